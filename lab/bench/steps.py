"""Time training steps of AlexNet on one process and on two: Figure 3.

Both processes hold every network. A round runs one step of each network in shuffled order, alone and
together. Alone, the first process computes the whole batch while the other waits. Together, each process
computes half the batch and DDP adds up the gradients. Every process has one thread, so only the number of
processes differs.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessContext, spawn

from covpool.models.create import create_model
from covpool.processes import Processes, joined_processes
from covpool.training.network import make_parallel
from lab.bench.layers import REFERENCE, paper_options
from lab.bench.timing import (
    Round,
    Spread,
    garbage_collector_off,
    interleaved_rounds,
    spread_figures,
    timing_figures,
    timing_of,
)

# The paper compares the first two; the third is the network without second-order pooling.
POOLS = (REFERENCE, "mpn_cov", "gap")
BATCH_SIZES = (8, 16, 32, 64, 128)


class Setting(NamedTuple):
    """The network to train; the defaults are the paper's.

    Attributes:
        pools: names of methods.
        hidden: widths of the two layers before the classifier.
    """

    pools: tuple[str, ...] = POOLS
    image_size: int = 224
    classes: int = 1000
    hidden: tuple[int, ...] = (4096, 4096)


# The paper's setting.
PAPER_SETTING = Setting()


class StepProgress(NamedTuple):
    """Progress of a round: its batch size, and the results of that size after its last round."""

    batch: int
    results: dict[str, Any] | None


def measured_steps(
    batch_sizes: Sequence[int], rounds: int, seed: int, setting: Setting = PAPER_SETTING
) -> Iterator[StepProgress]:
    """Time steps at every batch size, for a number of rounds each."""
    return from_two_processes(_steps, tuple(batch_sizes), rounds, seed, setting)


def _steps(
    processes: Processes, batch_sizes: Sequence[int], rounds: int, seed: int, setting: Setting
) -> Iterator[StepProgress]:
    torch.manual_seed(seed)
    trained = {pool: _Trained(pool, setting, processes) for pool in setting.pools}
    for batch in batch_sizes:
        yield from _rounds(trained, batch, rounds, seed, setting)


def _rounds(
    trained: Mapping[str, _Trained], batch: int, rounds: int, seed: int, setting: Setting
) -> Iterator[StepProgress]:
    images = torch.randn(batch, 3, setting.image_size, setting.image_size)
    labels = torch.randint(setting.classes, (batch,))
    steps = {_name(pool, count): (pool, count) for pool in trained for count in (1, 2)}

    def sample(name: str) -> float:
        pool, count = steps[name]
        return trained[pool].seconds(images, labels, together=count == 2)

    for name in steps:
        sample(name)  # the first step selects kernels and allocates memory
    done: list[Round] = []
    with garbage_collector_off():
        # Seeded, so that both processes use the same order.
        shuffler = random.Random(seed)
        for times in interleaved_rounds(sample, dict.fromkeys(steps, rounds), rounds, shuffler):
            done.append(times)
            yield StepProgress(batch, _results(batch, done, setting.pools) if len(done) == rounds else None)


def _results(batch: int, rounds: Sequence[Round], pools: Sequence[str]) -> dict[str, Any]:
    """Return times on one and two processes with ratios to the reference, and the speedup of two."""
    results: dict[str, Any] = {"batch": batch}
    for words, count in (("one", 1), ("two", 2)):
        timings = {pool: timing_of(_name(pool, count), _name(REFERENCE, count), rounds) for pool in pools}
        results[words] = {pool: timing_figures(timing) for pool, timing in timings.items()}
    results["two_over_one"] = {
        pool: spread_figures(Spread.of(times[_name(pool, 1)] / times[_name(pool, 2)] for times in rounds))
        for pool in pools
    }
    return results


def _name(pool: str, processes: int) -> str:
    return f"{pool} on {processes}"


class _Trained:
    """A network and its optimizer with the paper's settings, alone and in DDP."""

    def __init__(self, pool: str, setting: Setting, processes: Processes) -> None:
        self.processes = processes
        self.model = create_model(
            "alexnet",
            pool=pool,
            pool_options=paper_options(pool),
            dim=None,
            head="mlp",
            hidden=setting.hidden,
            hidden_batchnorm=True,
            num_classes=setting.classes,
            image_size=setting.image_size,
        ).train()
        self.parallel = make_parallel(self.model, processes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)

    def seconds(self, images: Tensor, labels: Tensor, *, together: bool) -> float:
        """Return the seconds of one step, from a barrier before it to a barrier after it."""
        dist.barrier()
        started = time.perf_counter()
        if together:
            rank, count = self.processes.rank, self.processes.world_size
            self._step(self.parallel, images.chunk(count)[rank], labels.chunk(count)[rank])
        elif self.processes.is_first:
            self._step(self.model, images, labels)
        dist.barrier()
        return time.perf_counter() - started

    def _step(self, network: nn.Module, images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(network(images), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


T = TypeVar("T")


def from_two_processes(act: Callable[..., Iterator[T]], *arguments: Any) -> Iterator[T]:
    """Run ``act(processes, *arguments)`` in two processes, and yield the items of the first.

    Args:
        act: a module-level function, so that a new process can import it.
        *arguments: arguments that can be pickled.
    """
    queue: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
    context = spawn(_one_of_two, (act, arguments, _free_port(), queue), nprocs=2, join=False)
    assert context is not None
    try:
        ended = False
        while not ended:
            ended = context.join(timeout=0.1)  # raises the error of a process
            while not queue.empty():
                yield queue.get()
    finally:
        _end(context)


def _one_of_two(
    rank: int, act: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], port: int, queue: Any
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
                queue.put(item)


def _end(context: ProcessContext) -> None:
    """End all processes, also if the caller stopped iterating."""
    for process in context.processes:
        if process.is_alive():
            process.terminate()
        process.join()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
