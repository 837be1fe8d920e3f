"""Sums of vectors: adding, removing and merging give the sums of the images themselves."""

from __future__ import annotations

import pytest
import torch

from covpool.closed_form.sums import RESERVOIR, Part, Rows, Sums, join_rows
from covpool.errors import UsageError

WIDTH, CLASSES = 12, ("a", "b", "c")


def made_rows(count: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        torch.randn(count, WIDTH, generator=generator),
        torch.randint(3, (count,), generator=generator),
        torch.randint(2**62, (count,), generator=generator),
    )


def new_sums(*, exact: bool) -> Sums:
    return Sums("vectors", CLASSES, WIDTH, max_rows_bytes=1 << 30 if exact else 0)


def assert_parts_equal(sums: Sums, rows: Rows) -> None:
    """Compare with sums that are computed in one go, by other operations."""
    for part, chosen in zip(sums.parts, (rows.images % 5 != 0, rows.images % 5 == 0), strict=True):
        x, labels = rows[chosen].vectors.double(), rows[chosen].labels
        torch.testing.assert_close(part.full_gram(), x.T @ x)
        for k in range(3):
            torch.testing.assert_close(part.class_sums[k], x[labels == k].sum(dim=0))
            assert part.counts[k] == (labels == k).sum()


def test_sums_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.closed_form.sums.BLOCK_COLUMNS", 5)  # 12 columns are three blocks
    rows, sums = made_rows(3000), new_sums(exact=False)
    for start in range(0, 3000, 77):
        sums.add(rows[start : start + 77])
    assert not sums.is_exact
    assert len(sums) == 3000
    assert sums.counts().tolist() == torch.bincount(rows.labels).tolist()
    assert_parts_equal(sums, rows)


def test_the_reservoir_does_not_depend_on_the_order() -> None:
    rows, kept = made_rows(12_000), []
    for order in (torch.arange(12_000), torch.arange(12_000).flip(0)):
        sums = new_sums(exact=False)
        sums.add(rows[order])
        kept.append(sums.rows.images)
    held_out = rows.images[rows.images % 5 == 0].sort().values
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], held_out[:RESERVOIR])


@pytest.mark.parametrize("exact", [True, False])
def test_removing_equals_never_adding(exact: bool) -> None:
    rows = made_rows(400)
    sums, without = new_sums(exact=exact), new_sums(exact=exact)
    sums.add(rows)
    sums.remove(rows[100:300])
    without.add(rows[:100])
    without.add(rows[300:])
    assert len(sums) == len(without) == 200
    if exact:
        assert torch.equal(sums.rows.vectors, without.rows.vectors)
    else:
        assert_parts_equal(sums, join_rows([rows[:100], rows[300:]]))
        assert torch.equal(sums.rows.images, without.rows.images)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_merging_with_a_new_class(first: bool, second: bool) -> None:
    rows = made_rows(300)
    ours = Sums("vectors", ("a", "b"), WIDTH, max_rows_bytes=1 << 30 if first else 0)
    theirs = Sums("vectors", ("c", "a"), WIDTH, max_rows_bytes=1 << 30 if second else 0)
    is_c = rows.labels == 2
    ours.add(rows[~is_c])
    theirs.add(Rows(rows.vectors[is_c], torch.zeros(int(is_c.sum()), dtype=torch.int64), rows.images[is_c]))
    merged = (ours + theirs).with_classes(CLASSES)
    assert merged.counts().tolist() == torch.bincount(rows.labels).tolist()
    if first and second:
        assert torch.equal(merged.rows.labels, rows[rows.images.argsort()].labels)
    else:
        assert_parts_equal(merged, rows)


def test_an_image_counts_once() -> None:
    rows, sums = made_rows(50), new_sums(exact=True)
    assert sums.add(join_rows([rows, rows[:10]])) == 50
    assert sums.add(rows[20:30]) == 0
    assert len(sums + sums) == 50


def test_tensors_and_back() -> None:
    for exact in (True, False):
        sums = new_sums(exact=exact)
        sums.add(made_rows(100))
        again = Sums.from_tensors("vectors", CLASSES, sums.to_tensors())
        assert again.is_exact is exact
        assert torch.equal(again.rows.vectors, sums.rows.vectors)
        assert again.counts().tolist() == sums.counts().tolist()
        if not exact:
            assert torch.equal(again.parts[0].gram, sums.parts[0].gram)


def test_mistakes_are_refused() -> None:
    rows, sums = made_rows(10), new_sums(exact=True)
    sums.add(rows[:5])
    with pytest.raises(UsageError, match="different vectors"):
        _ = sums + Sums("other vectors", CLASSES, WIDTH)
    with pytest.raises(UsageError, match="2 images to remove were never added"):
        sums.remove(rows[3:7])
    with pytest.raises(UsageError, match=r"must be \(B, 12\)"):
        sums.add(Rows(torch.zeros(3, 11), rows.labels[:3], rows.images[:3]))
    rows.vectors[7] = torch.nan
    with pytest.raises(UsageError, match="not finite"):
        sums.add(rows[5:])
    with pytest.raises(UsageError, match="cannot be left out"):
        sums.with_classes(["other"])


def test_only_the_upper_blocks_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.closed_form.sums.BLOCK_COLUMNS", 4)
    part = Part.zeros(3, WIDTH)
    part.add(made_rows(20))
    assert bool((part.gram[8:, :8] == 0).all())
    assert bool((part.gram[:4, 4:] != 0).all())
