"""Workers survive signals, and end with the main process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covpool.data.loader import TrainingLoader
from covpool.data.order import FolderOrder
from covpool.data.transforms import Augmentation, Preprocessing, training_transform
from tests.data.memory_images import memory_images
from tests.forked import finish, fork

ROOT = Path(__file__).parents[2]


def read_batches() -> Iterator[Any]:
    """Read the first of four batches, with one worker."""
    transform = training_transform(Preprocessing(16), Augmentation())
    loader = TrainingLoader(memory_images(8), FolderOrder(8, 2, seed=0), transform, workers=1)
    batches = loader.from_cursor(0)
    next(batches)
    return batches


def test_a_worker_outlives_signals(tmp_path: Path) -> None:
    def read() -> None:
        batches = read_batches()
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
        assert sum(1 for batch in batches) == 3
        assert worker.exitcode in (None, 0)  # it was not killed

    finish(fork(read, tmp_path / "log"), tmp_path / "log")


@pytest.mark.slow
def test_a_worker_ends_with_the_main_process() -> None:
    # The iterator still exists when Python exits and ends its workers.
    script = "from tests.data.test_workers import read_batches\nleft = read_batches()\n"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert (result.stdout, result.stderr) == ("", "")


# The main process asks a worker for a resource, as it does for a tensor, and disconnects.
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
