"""Results of real benchmarks at tiny sizes, shared by the tests that read results."""

from __future__ import annotations

from pathlib import Path

import pytest

from covpool.provenance import Results
from lab.bench.isqrt_cov import CONTENDERS, run_isqrt_cov
from lab.bench.layers import Size
from lab.bench.methods import run_methods
from lab.bench.timing import Schedule
from lab.record import read_record

TINY = Size("tiny", 16, 9, batch=4)
# One size with fewer positions than channels, and one with more.
TINY_SIZES = (Size("tiny", 16, 9, batch=2), Size("wide", 8, 20, batch=3))
QUICK = Schedule(rounds=3, warmup=1, sample_seconds=0.0)
EAGER = tuple(name for name in CONTENDERS if name != "compiled")


@pytest.fixture(scope="session")
def methods_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("methods")
    return run_methods(out, sections=["layers"], sizes=[TINY], schedule=QUICK)


@pytest.fixture
def methods_results(methods_file: Path) -> Results:
    return read_record(methods_file)


@pytest.fixture(scope="session")
def results_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    return run_isqrt_cov(out, sizes=TINY_SIZES, contenders=EAGER, schedule=QUICK)


@pytest.fixture
def results(results_file: Path) -> Results:
    return read_record(results_file)
