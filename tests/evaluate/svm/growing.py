"""Print the peak memory (MB) of a process after a pass over few rows, and over ten times as many."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np

from covpool.evaluate.svm.solvers import Problem, solve_streaming
from covpool.inference.store import RowFile

COLUMNS, CLASSES, AT_ONCE = 2048, 20, 500


def solve(folder: Path, rows: int) -> float:
    random = np.random.default_rng(0)
    file = RowFile.create(folder / f"rows-{rows}.npy", rows, COLUMNS)
    for first in range(0, rows, AT_ONCE):
        file.write(range(first, first + AT_ONCE), random.standard_normal((AT_ONCE, COLUMNS), np.float32) / 64)
    problem = Problem(file, np.arange(rows), np.arange(rows) % CLASSES, CLASSES)
    solve_streaming(problem, folder, tolerance=np.inf)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    print(solve(Path(sys.argv[1]), 1500), solve(Path(sys.argv[1]), 15_000))
