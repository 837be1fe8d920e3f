"""Orders: pure functions of (seed, epoch, step), the same global batches at every world size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covpool.data.order import BalancedOrder, EvaluationOrder, FolderOrder, Order, ShardOrder


def flat(order: Order, epoch: int) -> list[int]:
    steps = range(order.batches(epoch))
    return list(itertools.chain.from_iterable(order.batch(epoch, step).tolist() for step in steps))


@st.composite
def orders(draw: st.DrawFn, *, repeats: bool = True) -> tuple[Order, int]:
    """Draw an order and its number of samples."""
    kind = draw(st.sampled_from(["folder", "shards", "balanced"] if repeats else ["folder", "shards"]))
    seed = draw(st.integers(0, 2**40))
    if kind == "shards":
        counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum))
        batch_size = draw(st.integers(1, sum(counts)))
        return ShardOrder(counts, batch_size, seed, window=draw(st.integers(1, 5))), sum(counts)
    n = draw(st.integers(1, 60))
    batch_size = draw(st.integers(1, n))
    if kind == "folder":
        return FolderOrder(n, batch_size, seed), n
    return BalancedOrder(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), batch_size, seed), n


# Changing one of these values would change the order of every resumed run.
def test_orders_are_pinned() -> None:
    assert flat(FolderOrder(10, 3, seed=0), 0) == [6, 2, 7, 8, 4, 1, 5, 0, 3]
    assert flat(FolderOrder(10, 3, seed=0), 1) == [6, 7, 0, 2, 8, 3, 9, 1, 5]
    assert flat(ShardOrder([3, 4, 2, 1], 3, seed=0, window=2), 0) == [9, 8, 7, 4, 6, 1, 3, 2, 5]
    assert flat(BalancedOrder([0, 0, 0, 0, 0, 1, 1, 3], 3, seed=0), 0) == [3, 7, 4, 7, 6, 1]


@given(orders(repeats=False), st.integers(0, 5))
def test_an_epoch_has_each_sample_at_most_once_and_drops_less_than_a_batch(
    made: tuple[Order, int], epoch: int
) -> None:
    order, n = made
    samples = flat(order, epoch)
    assert len(samples) == n // order.batch_size * order.batch_size
    assert len(set(samples)) == len(samples)
    assert set(samples) <= set(range(n))


@given(orders(), st.integers(1, 7), st.integers(0, 3), st.data())
def test_shares_are_the_batch_divided(
    made: tuple[Order, int], world_size: int, epoch: int, data: st.DataObject
) -> None:
    order, _ = made
    ids = order.batch(epoch, data.draw(st.integers(0, order.batches(epoch) - 1)))
    assert len(ids) == order.batch_size
    shares = [order.share(ids, rank, world_size).tolist() for rank in range(world_size)]
    assert sorted(itertools.chain.from_iterable(shares)) == sorted(ids.tolist())
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(orders(), st.integers(0, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=5))
def test_a_batch_does_not_depend_on_those_asked_for_before(
    made: tuple[Order, int], epoch: int, others: list[tuple[int, int]]
) -> None:
    order, _ = made
    wanted = [order.batch(epoch, step).tolist() for step in range(order.batches(epoch))]
    for other_epoch, other_step in others:
        order.batch(other_epoch, other_step % order.batches(other_epoch))
    for step in reversed(range(order.batches(epoch))):
        assert order.batch(epoch, step).tolist() == wanted[step]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: FolderOrder(50, 5, seed),
        lambda seed: ShardOrder([10] * 5, 5, seed, window=2),
        lambda seed: BalancedOrder([0, 1] * 25, 5, seed),
    ],
    ids=["folder", "shards", "balanced"],
)
def test_seeds_and_epochs_give_other_orders(make: object) -> None:
    assert callable(make)
    found = {tuple(flat(make(seed), epoch)) for seed in range(3) for epoch in range(3)}
    assert len(found) == 9


def test_balanced_draws_classes_equally_and_their_samples_equally() -> None:
    labels = np.array([7] * 900 + [0] * 90 + [3] * 10)
    drawn = np.array([flat(BalancedOrder(labels, 100, seed=1), epoch) for epoch in range(12)]).ravel()
    expected = len(drawn) / 3
    for label in (0, 3, 7):
        assert abs((labels[drawn] == label).sum() - expected) < 5 * (expected * 2 / 3) ** 0.5
    rare = np.bincount(drawn, minlength=1000)[990:]
    assert (abs(rare - expected / 10) < 5 * (expected / 10) ** 0.5).all()


@given(n=st.integers(0, 90), batch_size=st.integers(1, 40), world_size=st.integers(1, 7))
def test_evaluation_sees_every_sample_once(n: int, batch_size: int, world_size: int) -> None:
    order, alone = EvaluationOrder(n, batch_size, world_size), EvaluationOrder(n, batch_size)
    seen = []
    for step in range(order.batches(0)):
        ids = order.batch(0, step)
        shares = [order.share(ids, rank, world_size).tolist() for rank in range(world_size)]
        seen += [share for share in shares if share]
    # The same batches as with one process.
    assert seen == [alone.batch(0, step).tolist() for step in range(alone.batches(0))]
    assert list(itertools.chain.from_iterable(seen)) == list(range(n))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: FolderOrder(3, 4, 0), "batch_size must be at most 3, the number of images; got 4"),
        (lambda: FolderOrder(3, 0, 0), "batch_size must be at least 1; got 0"),
        (lambda: BalancedOrder([], 1, 0), "batch_size must be at most 0, the number of images; got 1"),
        (lambda: ShardOrder([2], 1, 0, window=0), "window must be at least 1 shard; got 0"),
        (lambda: ShardOrder([2], 3, 0), "batch_size must be at most 2, the number of images; got 3"),
        (lambda: EvaluationOrder(3, 0), "batch_size must be at least 1; got 0"),
        (lambda: FolderOrder(3, 1, 0).batch(0, 3), "step must be from 0 to 2; got 3"),
        (lambda: FolderOrder(3, 1, 0).batch(-1, 0), "epoch must be at least 0; got -1"),
        (lambda: FolderOrder(3, 1, 0).share(np.arange(1), 2, 2), "rank must be from 0 to 1"),
        (lambda: EvaluationOrder(3, 1, 2).share(np.arange(1), 0, 3), "this order is for 2 processes; got 3"),
    ],
)
def test_mistakes(call: object, sentence: str) -> None:
    assert callable(call)
    with pytest.raises((ValueError, IndexError), match=f"^{sentence}"):
        call()
