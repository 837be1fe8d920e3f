from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from covpool.bench.two_processes import from_two_processes
from covpool.processes import Processes

pytestmark = pytest.mark.slow


def summed(processes: Processes, first: int) -> Iterator[tuple[int, float, int]]:
    for number in (first, first + 1):
        total = processes.sum_(torch.tensor([float(number + processes.rank)]))
        yield os.getpid(), total.item(), torch.get_num_threads()


def failing(processes: Processes) -> Iterator[int]:
    yield 1
    raise RuntimeError("as it was told")


def test_two_processes_of_one_thread_work_together() -> None:
    found = list(from_two_processes(summed, 10))
    assert [(total, threads) for _, total, threads in found] == [(21.0, 1), (23.0, 1)]
    assert os.getpid() not in {process for process, _, _ in found}


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(Exception, match="as it was told"):
        list(from_two_processes(failing))
