"""The order of samples in shards: shards in random order, samples in random order within a window of them.

Only a window's shards are read at a time, each shard once in an epoch, so a store sees sequential reads. No
array is longer than a window's samples or than the list of shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from covpool.data.order import Ids, check_order, check_step, chunk
from covpool.data.randomness import permutation

# Windows whose order is kept: a batch can begin in one and end in the next.
KEPT = 2


class ShardOrder:
    """The two-level order of shards.

    Args:
        counts: the samples in each shard; the samples are numbered from shard to shard.
        batch_size: of a global batch.
        seed: of the order.
        window: shards in a window. More of them mix better and need more of the cache.
    """

    repeats = False

    def __init__(self, counts: Sequence[int], batch_size: int, seed: int, window: int = 16) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 shard; got {window}")
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
        """A part of the windows' permutations, one after the other."""
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
        """A part of the batch sorted by shard and place, so that a process needs few shards.

        Which part is another's in the next batch: the first process, whose statistics of BatchNorm are kept,
        is not always to have the first shards.
        """
        turn = int(ids[0]) if len(ids) else 0
        return chunk(np.sort(ids), (rank + turn) % world_size, world_size)

    def shards(self, epoch: int, window: int) -> Ids:
        """The shards of a window; none past the last window."""
        return self._of_epoch(epoch)[0][window * self.window : (window + 1) * self.window]

    def _of_epoch(self, epoch: int) -> tuple[Ids, Ids]:
        """The shards in their order, and where each window starts among the epoch's samples."""
        if self._epoch is None or self._epoch[0] != epoch:
            shards = permutation(len(self._counts), "shards", self.seed, epoch)
            before = np.cumsum(self._counts[shards]) - self._counts[shards]
            self._epoch = epoch, shards, before[:: self.window]
        return self._epoch[1:]

    def _samples(self, epoch: int, window: int) -> Ids:
        """The samples of a window in their order."""
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
