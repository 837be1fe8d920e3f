"""``covpool doctor``: the report of a working machine, and of one with problems."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import covpool.doctor as examination
from covpool.cli.main import main
from covpool.doctor import Trial, _finding, checks, examination_text, examine
from covpool.doctor.checks import Finding, NotHereError


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the compiler, which takes longer than all other checks."""
    monkeypatch.setattr(checks, "compiled", lambda device: "works")


@pytest.mark.usefixtures("_quick")
def test_this_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    assert "testing this machine for half a minute at most" in captured.err
    report = json.loads(captured.out)
    assert {"python", "covpool", "torch"} <= report["versions"].keys()
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert [finding["state"] for finding in report["findings"]] == ["pass"] * 8
    stages: list[str] = []
    examine(lambda what, done, total: stages.append(what))
    assert stages == [f"tests: {finding['name']}" for finding in report["findings"]]


@pytest.mark.usefixtures("_quick")
def test_a_failure_has_a_remedy_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(checks, "PATIENCE", 2)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    workers, disk = (line for line in lines if line.startswith("fail  "))
    assert workers.startswith("fail  worker processes  DataLoader timed out after 2 seconds")
    assert workers.endswith("use --workers 0, or more shared memory: docker run --shm-size=8g")
    assert disk.startswith("fail  disk ")
    assert disk.endswith("free space there, or set TMPDIR to a folder on another disk")
    assert lines[-1] == "failed: worker processes, disk"


def test_a_wrong_root_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "isqrt_cov", lambda x, **_: 1.001 * checks.covariance(x))
    with pytest.raises(ArithmeticError, match="from eigh in float64"):
        checks.value("cpu")


def test_a_wrong_gradient_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "isqrt_cov", lambda x: (x * x.detach()).sum())
    assert _finding(Trial("gradient", lambda: checks.gradient("cpu"), "reinstall")).state == "fail"


def test_what_covpool_does_without_is_no_failure() -> None:
    def not_here() -> str:
        raise NotHereError("timm is not installed", "pip install timm")

    def broken() -> str:
        raise RuntimeError("no compiler\nand a long story")

    assert _finding(Trial("a", not_here, "")) == Finding(
        "a", "skip", "timm is not installed", "pip install timm"
    )
    assert _finding(Trial("b", broken, "install g++", is_needed=False)) == Finding(
        "b", "skip", "no compiler", "install g++"
    )


def test_a_missing_package_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("covpool.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(NotHereError, match="timm is not installed") as found:
        checks.training_step("cpu")
    assert found.value.remedy == "pip install 'covpool[models]'"


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch>=2.10", "torch>=2; extra == 'models'", 'no-such-package[x]>=1; extra == "models"']
    needed += ["torch; extra == 'data'", "ruff; extra == 'dev'"]
    monkeypatch.setattr(checks.metadata, "requires", lambda name: needed)
    assert checks.missing_by_extra() == {"data": (), "models": ("no-such-package",)}


def test_text() -> None:
    machine = {
        "cpu": "Z80",
        "cores": 1,
        "threads": 2,
        "memory_gib": 0.1,
        "flags": [],
        "capability": "DEFAULT",
    }
    found = examination.Examination(
        {"python": "3.12", "torch": "2.13"},
        machine,
        ("cpu",),
        "high",
        {"data": (), "models": ("timm",)},
        (Finding("disk", "pass", "8 MB"), Finding("images", "skip", "PIL is gone", "get it")),
    )
    assert examination_text(found).splitlines() == [
        "versions   python 3.12, torch 2.13",
        "processor  Z80, 1 core, 2 threads, 0.1 GiB, DEFAULT, no AMX",
        "devices    cpu",
        "float32    matrix products of precision high: TF32 is on",
        "extras     data",
        "           missing: models (timm): pip install 'covpool[models]'",
        "",
        "pass  disk    8 MB",
        "skip  images  PIL is gone: get it",
        "",
        "no problems found",
    ]


@pytest.mark.slow
def test_with_torch_alone() -> None:
    # Block the packages that verbs import first from their extras.
    script = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jsonargparse", "timm", "PIL", "torchvision", "yaml", "safetensors"):
            raise ModuleNotFoundError(f"no {name}", name=name)
sys.meta_path.insert(0, Blocker())
from covpool.doctor import checks
checks.compiled = lambda device: "works"
from covpool.cli.main import main
sys.exit(main(["doctor"]))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    skipped = [line for line in run.stdout.splitlines() if line.startswith("skip  ")]
    assert [line.split("  ")[-1].strip() for line in skipped] == [
        "timm is not installed: pip install 'covpool[models]'",
        "PIL is not installed: pip install 'covpool[data]'",
    ]


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 2
    sentence = "covpool doctor: unrecognized arguments: --quick; "
    sentence += "the options are --json, --quiet and --debug"
    assert capsys.readouterr() == ("", f"{sentence}\n")


@pytest.mark.slow
def test_the_compiler() -> None:
    assert checks.compiled("cpu") == "works"
    assert examine().is_well


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import covpool.terminal
from covpool.cli.start import DoctorArguments, run_doctor
covpool.terminal.NamedProgress = lambda: sys.exit(0)  # after the imports
run_doctor(DoctorArguments())
"""


@pytest.mark.slow
def test_torch_does_not_warn_of_a_missing_numpy() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True, check=True)
    assert run.stderr == ""
