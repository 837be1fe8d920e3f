"""Persistent processes that run calls together. Starting them is slow, so tests share a group."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # takes seconds; optimizers and DDP import it, so import it once, before the fork
import torch.distributed as dist

SECONDS = 120


class Group:
    """A group of gloo processes. A call runs in all of them and returns the list of their results."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = theirs, rank, world_size, f"{self._folder.name}/rendezvous"
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(SECONDS), "a process does not answer"
            answers.append(pipe.recv())
        for is_error, answer in answers:
            assert not is_error, answer
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(SECONDS)
            process.kill()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, world_size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns about DDP
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    while (asked := pipe.recv()) is not None:
        function, arguments = asked
        try:
            pipe.send((False, function(*arguments)))
        except Exception:
            pipe.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()
