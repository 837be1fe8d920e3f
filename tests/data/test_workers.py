"""Workers outlive a signal, but not the main process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_worker_outlives_signals_and_ends_with_the_main_process() -> None:
    script = SCRIPT + SIGNALS + "others = loader.from_cursor(0)\nnext(others)\n"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert (result.stdout, result.stderr) == ("3 True\n", "")


# The main process asks for something that a worker holds, as it does for a tensor, and is gone.
GONE = """
import socket, time
from multiprocessing.resource_sharer import _resource_sharer
from torch.utils.data import DataLoader
from covpool.data.loader import outlive_signals

class Held:
    def __getitem__(self, number):
        address, key = _resource_sharer.register(print, print)
        return address

addresses = iter(DataLoader(Held(), batch_size=None, sampler=[0, 1], num_workers=1, worker_init_fn=INIT))
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(next(addresses))
time.sleep(1)
"""


def told_when_gone(init: str) -> str:
    script = GONE.replace("INIT", init)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
def test_a_worker_does_not_tell_that_the_main_process_is_gone() -> None:
    assert "Traceback" in told_when_gone("None")
    assert told_when_gone("outlive_signals()") == ""
