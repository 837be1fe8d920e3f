"""The order of samples in training and evaluation, reproducible on any number of processes.

Random numbers depend on a key, such as ``"order", seed, epoch``. BLAKE2 hashes it to the key of Philox, a
counter-based generator. Only the raw output of Philox is used, which numpy guarantees never to change.

Shards are read one window at a time, each shard once per epoch, so object storage sees sequential reads. No
array is longer than the samples of a window or the list of shards.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from covpool.errors import UsageError
from covpool.storage.files import digest_number


def number(what: str, *key: int, size: int = 64) -> int:
    """Return the random integer of a key, with ``size`` bits.

    Example:
        >>> number("order", 0, 7) == number("order", 0, 7) != number("order", 0, 8)
        True
    """
    text = ":".join([what, *(str(operator.index(part)) for part in key)])
    return digest_number(text, size)


def numbers(count: int, what: str, *key: int) -> NDArray[np.uint64]:
    """Return ``count`` random 64-bit integers of a key."""
    drawn: NDArray[np.uint64] = np.random.Philox(key=number(what, *key, size=128)).random_raw(count)
    return drawn


def permutation(n: int, what: str, *key: int) -> NDArray[np.int64]:
    """Return a random permutation of 0 to n - 1, by sorting random numbers."""
    # The sort is stable, so that equal random numbers give a defined order.
    return np.argsort(numbers(n, what, *key), kind="stable").astype(np.int64, copy=False)


def some_groups(sizes: Sequence[int], count: int, seed: int) -> list[int]:
    """Return a few groups by number, chosen by the seed, that have at least ``count`` samples together."""
    order = permutation(len(sizes), "some shards", seed).tolist()
    ends = list(accumulate(sizes[i] for i in order))
    return sorted(order[: bisect_right(ends, count - 1) + 1])


@contextmanager
def torch_seeded(what: str, *key: int) -> Iterator[None]:
    """Seed torch's CPU generator by a key inside the context, and restore its state afterwards.

    ``torch.manual_seed`` would also seed the GPU generators, permanently.
    """
    generator = torch.default_generator
    before = generator.get_state()
    try:
        generator.manual_seed(number(what, *key))
        yield
    finally:
        generator.set_state(before)


Ids = NDArray[np.int64]


class Order(Protocol):
    """The interface of an order for the loaders."""

    @property
    def batch_size(self) -> int:
        """Size of a global batch."""

    @property
    def repeats(self) -> bool:
        """Whether a sample can occur more than once per epoch."""

    def batches(self, epoch: int) -> int:
        """Return the number of global batches per epoch."""

    def batch(self, epoch: int, step: int) -> Ids:
        """Return the samples of a global batch."""

    def share(self, ids: Ids, rank: int, world_size: int) -> Ids:
        """Return the samples of a global batch for one process; each belongs to exactly one."""


def chunk(ids: Ids, rank: int, world_size: int) -> Ids:
    """Return one of ``world_size`` consecutive parts, whose lengths differ by at most one.

    Example:
        >>> [chunk(np.arange(5), rank, 2).tolist() for rank in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"rank must be from 0 to {world_size - 1}, one below world_size; got {rank}")
    return ids[len(ids) * rank // world_size : len(ids) * (rank + 1) // world_size]


def check_order(n: int, batch_size: int) -> None:
    """Raise unless ``n`` samples fill at least one batch."""
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1; got {batch_size}")
    if n < batch_size:
        raise UsageError(f"batch_size must be at most {n}, the number of images; got {batch_size}")


def check_step(epoch: int, step: int, batches: int) -> None:
    """Raise unless epoch and step are in range."""
    if epoch < 0:
        raise UsageError(f"epoch must be at least 0; got {epoch}")
    if not 0 <= step < batches:
        raise IndexError(f"step must be from 0 to {batches - 1}; got {step}")


class FolderOrder:
    """All samples in random order, which differs between epochs."""

    repeats = False

    def __init__(self, n: int, batch_size: int, seed: int) -> None:
        check_order(n, batch_size)
        self.n, self.batch_size, self.seed = n, batch_size, seed
        self._kept: tuple[int, Ids] | None = None

    def batches(self, epoch: int) -> int:
        """Whole batches in an epoch: the same in each."""
        return self.n // self.batch_size

    def batch(self, epoch: int, step: int) -> Ids:
        """Return a part of the epoch's permutation."""
        check_step(epoch, step, self.batches(epoch))
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, permutation(self.n, "order", self.seed, epoch)
        return self._kept[1][step * self.batch_size : (step + 1) * self.batch_size]

    def share(self, ids: Ids, rank: int, world_size: int) -> Ids:
        """Return a part of the batch; it is in random order, so all processes get the same class mixture."""
        return chunk(ids, rank, world_size)


class BalancedOrder:
    """Class-balanced sampling: every class is equally likely, and its samples are drawn with replacement.

    An epoch has as many batches as if each sample occurred once.
    """

    repeats = True

    def __init__(self, labels: Sequence[int] | ArrayLike, batch_size: int, seed: int) -> None:
        array: Ids = np.asarray(labels, dtype=np.int64)
        check_order(len(array), batch_size)
        self.batch_size, self.seed = batch_size, seed
        self._by_class: Ids = np.argsort(array, kind="stable").astype(np.int64, copy=False)
        # Only classes with samples can be drawn.
        _, starts, counts = np.unique(array[self._by_class], return_index=True, return_counts=True)
        self._starts, self._counts = starts.astype(np.int64), counts.astype(np.int64)

    def batches(self, epoch: int) -> int:
        """Return the number of complete batches per epoch."""
        return len(self._by_class) // self.batch_size

    def batch(self, epoch: int, step: int) -> Ids:
        """Draw a class for each position of the batch, then a sample of that class."""
        check_step(epoch, step, self.batches(epoch))
        drawn = numbers(2 * self.batch_size, "balanced", self.seed, epoch, step)
        classes = (drawn[: self.batch_size] % np.uint64(len(self._starts))).astype(np.int64)
        indices = drawn[self.batch_size :] % self._counts[classes].astype(np.uint64)
        return self._by_class[self._starts[classes] + indices.astype(np.int64)]

    def share(self, ids: Ids, rank: int, world_size: int) -> Ids:
        """Return a part of the batch."""
        return chunk(ids, rank, world_size)


class EvaluationOrder:
    """Every sample exactly once, without padding, in batches that are dealt to the processes in turn.

    The batches do not depend on the number of processes, so results are bit-identical. In the last step some
    processes may have fewer samples or none.
    """

    repeats = False

    def __init__(self, n: int, batch_size: int, world_size: int = 1) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1; got {batch_size}")
        self.n, self.each, self.world_size = n, batch_size, world_size
        self.batch_size = batch_size * world_size

    def batches(self, epoch: int) -> int:
        """Return the number of steps for all samples."""
        return -(-self.n // self.batch_size)

    def batch(self, epoch: int, step: int) -> Ids:
        """Return the samples of a step, one batch per process."""
        check_step(epoch, step, self.batches(epoch))
        first = step * self.batch_size
        return np.arange(first, min(first + self.batch_size, self.n), dtype=np.int64)

    def share(self, ids: Ids, rank: int, world_size: int) -> Ids:
        """Return the batch of a process."""
        if world_size != self.world_size:
            raise UsageError(f"this order is for {self.world_size} processes; got {world_size}")
        return ids[rank * self.each : (rank + 1) * self.each]


# Cached windows: a batch can start in one window and end in the next.
KEPT = 2


class ShardOrder:
    """The two-level order of shards or row groups.

    Args:
        counts: number of samples in each shard; samples are numbered consecutively across shards.
        batch_size: size of a global batch.
        seed: random seed.
        window: number of shards in a window. A larger window shuffles better and needs more cache or memory.
    """

    repeats = False

    def __init__(self, counts: Sequence[int], batch_size: int, seed: int, window: int = 16) -> None:
        if window < 1:
            raise UsageError(f"window must be at least 1 shard; got {window}")
        self.batch_size, self.seed, self.window = batch_size, seed, window
        self._ends: NDArray[np.int64] = np.cumsum(np.asarray(counts, dtype=np.int64))
        self._counts: NDArray[np.int64] = np.asarray(counts, dtype=np.int64)
        self.n = int(self._counts.sum())
        check_order(self.n, batch_size)
        self._epoch: tuple[int, Ids, Ids] | None = None
        self._windows: dict[tuple[int, int], Ids] = {}

    def batches(self, epoch: int) -> int:
        """Whole batches in an epoch: the same in each."""
        return self.n // self.batch_size

    def batch(self, epoch: int, step: int) -> Ids:
        """Return a part of the concatenated permutations of the windows."""
        check_step(epoch, step, self.batches(epoch))
        starts = self._of_epoch(epoch)[1]
        first, last = step * self.batch_size, (step + 1) * self.batch_size
        begin = int(np.searchsorted(starts, first, side="right")) - 1
        end = int(np.searchsorted(starts, last, side="left"))
        parts = [
            self._samples(epoch, window)[max(first - starts[window], 0) : last - starts[window]]
            for window in range(begin, end)
        ]
        return np.concatenate(parts)

    def share(self, ids: Ids, rank: int, world_size: int) -> Ids:
        """Return a part of the batch sorted by shard and position, so that a process reads few shards.

        The parts rotate between batches: the BatchNorm statistics are those of the first process, which
        should not always read the first shards.
        """
        turn = int(ids[0]) if len(ids) else 0
        return chunk(np.sort(ids), (rank + turn) % world_size, world_size)

    def shards(self, epoch: int, window: int) -> Ids:
        """Return the shards of a window; none after the last window."""
        return self._of_epoch(epoch)[0][window * self.window : (window + 1) * self.window]

    def _of_epoch(self, epoch: int) -> tuple[Ids, Ids]:
        """Return the shuffled shards, and the first sample of each window in the epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            shards = permutation(len(self._counts), "shards", self.seed, epoch)
            before = np.cumsum(self._counts[shards]) - self._counts[shards]
            self._epoch = epoch, shards, before[:: self.window]
        return self._epoch[1:]

    def _samples(self, epoch: int, window: int) -> Ids:
        """Return the shuffled samples of a window."""
        key = epoch, window
        if key not in self._windows:
            ranges = [
                np.arange(self._ends[shard] - self._counts[shard], self._ends[shard])
                for shard in self.shards(epoch, window)
            ]
            samples = np.concatenate(ranges)
            while len(self._windows) >= KEPT:
                del self._windows[next(iter(self._windows))]
            self._windows[key] = samples[permutation(len(samples), "window", self.seed, epoch, window)]
        return self._windows[key]
