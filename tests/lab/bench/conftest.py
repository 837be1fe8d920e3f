"""Results of one real benchmark of the layers at a tiny size, shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench import Schedule, Size, run_methods
from lab.bench.methods import read_results
from covpool.provenance.origin import Results

TINY = Size("tiny", 16, 9, batch=4)
QUICK = Schedule(rounds=2, warmup=1, sample_seconds=0.0)


@pytest.fixture(scope="session")
def methods_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("methods")
    return run_methods(out, sections=["layers"], sizes=[TINY], schedule=QUICK)


@pytest.fixture
def methods_results(methods_file: Path) -> Results:
    return read_results(methods_file)
