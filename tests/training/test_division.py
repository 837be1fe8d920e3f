"""Images set aside for validation, by class and by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covpool.data.image_set import ImageFiles, ImageSet, Names, class_counts
from covpool.data.sources import open_images
from covpool.training.splits import sample, split_off
from tests.data.pictures import SPARROWS, needs_sparrows


def make(counts: list[int], order: int = 0) -> ImageFiles:
    """Return ``counts`` images per class, shuffled with the seed ``order``."""
    rows = [(f"{label}/{i}.jpg", label) for label, count in enumerate(counts) for i in range(count)]
    rows = [rows[i] for i in np.random.default_rng(order).permutation(len(rows))]
    labels = np.array([label for _, label in rows], dtype=np.int32)
    classes = tuple(str(label) for label in range(len(counts)))
    return ImageFiles(Path("none"), classes, Names(name for name, _ in rows), labels)


def names(images: ImageSet) -> set[str]:
    return {images.name(i) for i in range(len(images))}


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda counts: max(counts) > 1),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
)
def test_every_class_in_proportion(counts: list[int], fraction: float, seed: int) -> None:
    images = make(counts)
    if round(fraction * sum(counts)) == 0:
        return
    left, aside = split_off(images, fraction, seed)
    assert names(left) | names(aside) == names(images)
    assert not names(left) & names(aside)
    assert left.classes == aside.classes == images.classes
    for label, count in enumerate(counts):
        share = class_counts(aside)[label]
        assert share <= max(count - 1, 0)
        assert abs(share - min(fraction * count, max(count - 1, 0))) < 1
    # The requested number, unless a class would be left empty.
    if all(fraction * count <= count - 1 for count in counts):
        assert len(aside) == round(fraction * sum(counts))
    for part in (left, aside):
        assert [int(label) for label in part.labels] == [
            int(part.name(i)[: part.name(i).index("/")]) for i in range(len(part))
        ]


def test_it_depends_on_names_and_seed_alone() -> None:
    counts = [20] * 10
    chosen = names(split_off(make(counts), 0.2, seed=3)[1])
    assert names(split_off(make(counts, order=1), 0.2, seed=3)[1]) == chosen
    assert names(split_off(make(counts), 0.2, seed=4)[1]) != chosen
    # A seed must give these names on every machine and in every version.
    assert sorted(chosen)[:4] == ["0/15.jpg", "0/19.jpg", "0/2.jpg", "0/3.jpg"]


def test_most_stay_when_images_come() -> None:
    before = names(split_off(make([100] * 5), 0.2)[1])
    after = names(split_off(make([104] * 5), 0.2)[1])
    assert len(before & after) > 0.9 * len(before)


@pytest.mark.parametrize(
    ("counts", "fraction", "sentence"),
    [
        ([10], 0, "fraction must be above 0 and below 1; got 0"),
        ([10], 1.0, "fraction must be above 0 and below 1; got 1.0"),
        ([10], float("nan"), "fraction must be above 0 and below 1; got nan"),
        (
            [1, 1, 1],
            0.5,
            "no image can be set aside: 0.5 of 3 is too few: every class keeps one",
        ),
        ([10], 0.01, "no image can be set aside: 0.01 of 10 is too few: every class keeps one"),
    ],
)
def test_mistakes(counts: list[int], fraction: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        split_off(make(counts), fraction)


@needs_sparrows
def test_sparrows() -> None:
    train = open_images(SPARROWS)
    _, aside = split_off(train, 0.1)
    assert len(aside) == round(0.1 * len(train))
    assert class_counts(aside).min() > 0
    i = int(np.flatnonzero(aside.labels == 3)[0])
    assert aside.name(i).split("/")[1] == train.classes[3]
    assert aside.read(i) == (SPARROWS / aside.name(i)).read_bytes()
    again, _ = split_off(aside, 0.5)
    assert names(again) < names(aside)


@given(counts=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any), count=st.integers(1, 60))
def test_a_sample_has_so_many_images_of_all_classes_alike(counts: list[int], count: int) -> None:
    images = make(counts)
    found = sample(images, count)
    assert len(found) == min(count, len(images))
    exact = np.array(counts) * len(found) / len(images)
    assert (abs(class_counts(found) - exact) < 1 + 1e-9).all()
    assert np.array_equal(found.indices, sample(images, count).indices)


def test_of_one_image_a_class_a_sample_takes_some() -> None:
    assert len(sample(make([1] * 30), 20)) == 20
