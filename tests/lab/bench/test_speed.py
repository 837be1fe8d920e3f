"""The targets of :mod:`lab.bench.isqrt_cov_table`, asserted at the real sizes.

Timing needs an idle machine, so these tests are skipped under pytest-xdist.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from covpool.provenance import Results, describe_machine
from lab.bench.isqrt_cov_table import TARGETS, Target
from lab.record import read_record

ROOT = Path(__file__).parents[3]
ROUNDS = 15
# The median of a run of this length can miss a target by this much through noise. Memory has no noise.
MARGIN = 0.05
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ, reason="timing needs the machine: run without -n"
    ),
    pytest.mark.skipif(describe_machine("cpu")["cores"] < 2, reason="targets are stated for two cores"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of a run in a separate process, on all cores; the test process is limited to one thread."""
    out = tmp_path_factory.mktemp("speed")
    command = [sys.executable, "-m", "lab", "isqrt_cov", "--rounds", str(ROUNDS)]
    done = subprocess.run(
        [*command, "--out", str(out)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in THREAD_LIMITS},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=3600,
    )
    return read_record(done.stdout.splitlines()[0])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.size}-{target.label}")
def test_target(measured: Results, target: Target) -> None:
    figures = target.measured(measured["sizes"][target.size])
    assert figures is not None
    margin = 0.0 if target.quantity == "memory" else MARGIN
    verdict = (
        f"{target.label} at {target.size}: {figures[0]:.3g} [{figures[1]:.3g}, {figures[2]:.3g}], "
        f"wanted {target.bound_text}"
    )
    print(verdict)
    if target.limit and not target.met(figures[0], margin):
        pytest.xfail(f"{verdict}; {target.limit}")
    assert target.met(figures[0], margin), verdict
