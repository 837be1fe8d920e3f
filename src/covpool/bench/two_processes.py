"""Work on two real processes of one thread each, and what the first of them finds, as it finds it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.multiprocessing.spawn import ProcessContext, spawn

from covpool.processes import joined_processes

T = TypeVar("T")


def from_two_processes(act: Callable[..., Iterator[T]], *arguments: Any) -> Iterator[T]:
    """What ``act(processes, *arguments)`` yields in the first of two processes that both run it.

    Args:
        act: a function of a module, so that a new process can import it.
        *arguments: that can be pickled.
    """
    found: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
    context = spawn(_one_of_two, (act, arguments, _free_port(), found), nprocs=2, join=False)
    assert context is not None
    try:
        ended = False
        while not ended:
            ended = context.join(timeout=0.1)  # raises what was raised there
            while not found.empty():
                yield found.get()
    finally:
        _end(context)


def _one_of_two(
    rank: int, act: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], port: int, found: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with joined_processes("cpu") as processes:
        for item in act(processes, *arguments):
            if processes.is_first:
                found.put(item)


def _end(context: ProcessContext) -> None:
    """Leave no process behind when whoever asked has stopped listening."""
    for process in context.processes:
        if process.is_alive():
            process.terminate()
        process.join()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
