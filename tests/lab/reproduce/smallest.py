"""Run one experiment in its smallest form, as a process that can be killed: DATA FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lab.reproduce.experiments import FIGURE4
from lab.reproduce.networks import SMALLEST
from lab.reproduce.runner import Place, run_experiments

if __name__ == "__main__":
    torch.set_num_threads(1)
    data, folder = map(Path, sys.argv[1:])
    run_experiments([FIGURE4], Place(data, folder / "runs", folder / "out", SMALLEST), seeds=1)
