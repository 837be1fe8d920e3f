"""Workers outlive a signal, but not the main process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a script leaves behind is still there when Python ends its workers.
SCRIPT = """
import multiprocessing, os, signal
from covpool.data.loader import TrainingLoader
from covpool.data.order import FolderOrder
from covpool.data.transforms import Augmentation, Preprocessing, training_transform
from tests.data.memory_images import memory_images

transform = training_transform(Preprocessing(16), Augmentation())
loader = TrainingLoader(memory_images(8), FolderOrder(8, 2, seed=0), transform, workers=1)
batches = loader.from_cursor(0)
next(batches)
(worker,) = multiprocessing.active_children()
"""
SIGNALS = """
os.kill(worker.pid, signal.SIGTERM)
os.kill(worker.pid, signal.SIGINT)
print(sum(1 for batch in batches), worker.is_alive())
"""


def run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return result.stdout


def test_a_worker_outlives_signals() -> None:
    assert run(SCRIPT + SIGNALS) == "3 True\n"


def test_a_worker_ends_with_the_main_process() -> None:
    assert run(SCRIPT) == ""
