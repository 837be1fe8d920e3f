"""Results of one real run at tiny sizes, shared by the tests that read results."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.isqrt_cov import CONTENDERS, read_results, run_isqrt_cov
from lab.bench import Schedule, Size
from covpool.provenance.origin import Results
from tests.lab.bench.conftest import methods_file, methods_results  # noqa: F401

# One size with fewer positions than channels, and one with more.
TINY_SIZES = (Size("tiny", 16, 9, batch=2), Size("wide", 8, 20, batch=3))
QUICK = Schedule(rounds=3, warmup=1, sample_seconds=0.0)
EAGER = tuple(name for name in CONTENDERS if name != "compiled")


@pytest.fixture(scope="session")
def results_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    return run_isqrt_cov(out, sizes=TINY_SIZES, contenders=EAGER, schedule=QUICK)


@pytest.fixture
def results(results_file: Path) -> Results:
    return read_results(results_file)
