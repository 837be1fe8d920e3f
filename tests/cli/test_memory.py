"""The malloc settings of the command line, measured by the page faults of a process."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")

# 64 MB are 16,384 pages of 4 KB, or 32 huge pages of 2 MB.
FAULTS = """
import resource
import torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use():
    torch.empty(64 * 2**20, dtype=torch.uint8).fill_(1)

# At first the heap grows, as what is small takes places that were large.
for _ in range(40):
    use()
before = faults()
for _ in range(20):
    use()
print(faults() - before)
"""
KEPT = 20  # page faults from other causes


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a temporary folder: commands create their default folders in the current one."""
    monkeypatch.chdir(tmp_path)


def faults_after(code: str, environment: Mapping[str, str] | None = None) -> float:
    """Return the page faults of using 64 MB twenty times, after ``code`` in the same process."""
    return result_of(code + FAULTS, environment)


def result_of(code: str, environment: Mapping[str, str] | None = None) -> float:
    """Return the last number that a process prints."""
    # Without the malloc settings of the caller and of the test process.
    source = os.environ.get("PYTHONPATH", "")
    clean = {"PATH": "", "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=clean,
        timeout=300,
    )
    return float(done.stdout.splitlines()[-1])


def shell(*words: str) -> str:
    """Return Python code that runs a covpool command."""
    return f"""
import sys
from covpool.cli.main import main
sys.argv = {["covpool", *words]!r}
main()
"""


CPU_SECONDS = """
import resource
import timm

model = timm.create_model("tf_efficientnet_lite0").eval().to(memory_format=torch.channels_last)
batch = torch.zeros(16, 3, 448, 448).contiguous(memory_format=torch.channels_last)

def seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

with torch.inference_mode():
    model(batch)
    before = seconds()
    model(batch)
print(seconds() - before)
"""


@pytest.mark.slow
def test_a_network_takes_less_time() -> None:
    ours = shell("eval", "nothing", "nowhere") + "import torch" + CPU_SECONDS
    ratios = [result_of("import torch" + CPU_SECONDS) / result_of(ours) for _ in range(3)]
    print(f"{statistics.median(ratios):.2f} times as fast (EfficientNet-Lite0, 448 pixels)")
    assert statistics.median(ratios) > 1.2


@pytest.mark.slow
def test_freed_memory_is_found_again() -> None:
    assert faults_after(shell("eval", "nothing", "nowhere")) < KEPT


@pytest.mark.slow
def test_the_c_library_is_left_alone_when_a_program_calls_main() -> None:
    code = "from covpool.cli.main import main; main(['eval', 'nothing', 'nowhere'])"
    assert faults_after(code) > 20 * KEPT


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}],
    ids=["a variable", "a tunable"],
)
def test_settings_of_the_user_stay(environment: dict[str, str]) -> None:
    assert faults_after(shell("eval", "nothing", "nowhere"), environment) > 20 * KEPT
