"""A process of its own: stream SVMs, and be killed after the first pass."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from covpool.evaluate.svm.solvers import solve_streaming
from tests.evaluate.svm.samples import a_problem


def die(done: int, violation: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    solve_streaming(a_problem(3, 10, 20), Path(sys.argv[1]), passes=die)
