"""The two-level order of shards: its windows, the shards a process needs, and its memory."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from covpool.data.order import ShardOrder


def shard_of(ids: np.ndarray, counts: list[int]) -> list[int]:
    return np.searchsorted(np.cumsum(counts), ids, side="right").tolist()  # type: ignore[no-any-return]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum),
    window=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_a_window_is_read_after_the_other(counts: list[int], window: int, epoch: int) -> None:
    order = ShardOrder(counts, 1, seed=4, window=window)
    samples = [int(order.batch(epoch, step)[0]) for step in range(order.batches(epoch))]
    windows = [order.shards(epoch, number).tolist() for number in range(-(-len(counts) // window))]
    assert sorted(itertools.chain.from_iterable(windows)) == list(range(len(counts)))
    assert all(len(shards) == window for shards in windows[:-1])
    for shards in windows:
        length = sum(counts[shard] for shard in shards)
        assert set(shard_of(np.array(samples[:length], dtype=int), counts)) <= set(shards)
        samples = samples[length:]
    assert not samples


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=12), world_size=st.integers(1, 8), data=st.data()
)
def test_a_process_needs_few_shards(counts: list[int], world_size: int, data: st.DataObject) -> None:
    order = ShardOrder(counts, data.draw(st.integers(1, sum(counts))), seed=0)
    ids = order.batch(0, 0)
    needed = [set(shard_of(order.share(ids, rank, world_size), counts)) for rank in range(world_size)]
    # Each shard is needed by one process, except shards divided between two processes.
    assert sum(map(len, needed)) <= len(set(shard_of(ids, counts))) + world_size - 1


def test_samples_of_a_window_are_mixed() -> None:
    order = ShardOrder([100] * 20, 100, seed=0, window=10)
    for step in range(order.batches(0)):
        counts = np.bincount(shard_of(order.batch(0, step), [100] * 20), minlength=20)
        assert (counts > 0).sum() == 10
        assert counts.max() < 30


def test_no_array_is_longer_than_a_window() -> None:
    # 100 million samples: an array of all would take 800 MB, an array of one window takes 1.3 MB.
    order = ShardOrder([10_000] * 10_000, 1024, seed=0, window=16)
    tracemalloc.start()
    try:
        order.batch(0, 0)
        order.batch(0, order.batches(0) // 2)
        order.batch(3, order.batches(3) - 1)
        assert tracemalloc.get_traced_memory()[1] < 12e6
    finally:
        tracemalloc.stop()
