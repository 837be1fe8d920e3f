"""Two runs side by side: the numbers of their difference, and a page as harmless as that of one."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from covpool.data.image_set import ImageSet, Subset
from covpool.data.sources import open_images
from covpool.train.report import write_comparison
from covpool.train.report.pages import _difference, _recipe_differences, pair
from covpool.train.report.record import read_run
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.train.report.runs import invented, labelled, write_run
from tests.train.report.test_one_run import EVIL, Page, assert_harmless

CLASSES = [f"class {number}" for number in range(10)]


def rights(folder: Path) -> dict[str, bool]:
    with (folder / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: row["label"] == row["predicted"] for row in csv.DictReader(file)}


def test_images_are_paired_by_name_whatever_their_order(tmp_path: Path) -> None:
    images = invented(10, 20)
    write_run(tmp_path / "a", CLASSES, images, accuracy=0.8)
    write_run(
        tmp_path / "b", CLASSES[::-1], [(n, 9 - c) for n, c in images[::-1]][:150], accuracy=0.6, seed=1
    )
    a, b = rights(tmp_path / "a"), rights(tmp_path / "b")
    first, second = (read_run(tmp_path / name).predictions for name in "ab")
    found = _difference(first, second, pair(first, second))
    assert found is not None
    assert found.images == 150
    assert found.first_only == sum(a[name] and not b[name] for name in b)
    assert found.second_only == sum(b[name] and not a[name] for name in b)
    assert found.difference == pytest.approx(np.mean([a[name] for name in b]) - np.mean(list(b.values())))


def test_images_of_another_class_are_not_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "a", CLASSES, [("1.jpg", 0), ("2.jpg", 1)])
    write_run(tmp_path / "b", CLASSES, [("1.jpg", 0), ("2.jpg", 2)])
    assert len(pair(*(read_run(tmp_path / name).predictions for name in "ab")).first) == 1


@needs_sparrows
def test_the_page(tmp_path: Path) -> None:
    all_sparrows = open_images(SPARROWS, "test")
    images: ImageSet = Subset(all_sparrows, np.arange(0, len(all_sparrows), 6))
    first, second = (
        write_run(tmp_path / pool, images.classes, labelled(images), accuracy=accuracy, seed=seed, pool=pool)
        for pool, accuracy, seed in (("isqrt_cov", 0.8, 0), ("gap", 0.6, 1))
    )
    page = Page(write_comparison(tmp_path / "new/both", {"isqrt_cov": first, EVIL[0]: second}, images))
    assert_harmless(page)
    a, b = rights(first), rights(second)
    difference = 100 * (np.mean(list(a.values())) - np.mean(list(b.values())))
    assert f"{difference:+.1f} points of top-1: isqrt_cov minus {EVIL[0]}" in page.words
    assert f"isqrt_cov alone is right on {sum(a[n] and not b[n] for n in a)}" in page.words
    assert "It is one training of each" in page.words
    assert "model.poolisqrt_covgap" in page.words  # in cells
    thumbnails = [
        1 for tag, attributes in page.elements if (attributes.get("src") or "").startswith("data:image/jpeg")
    ]
    only_b = sum(b[name] and not a[name] for name in a)
    assert len(thumbnails) == 12 + min(12, only_b)
    assert (tmp_path / "new/both/curves.png").stat().st_size > 10_000


def test_runs_without_an_image_in_common(tmp_path: Path) -> None:
    write_run(tmp_path / "a", CLASSES, invented(10, 2))
    write_run(tmp_path / "b", CLASSES, [], split=None)
    page = Page(write_comparison(tmp_path / "both", {"a": tmp_path / "a", "b": tmp_path / "b"}))
    assert_harmless(page)
    assert "Nothing to compare by" in page.words


def test_two_runs_are_compared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two runs can be compared; got 1"):
        write_comparison(tmp_path, {"a": tmp_path})


def test_differences_of_recipes() -> None:
    first = "a: {b: 1, c: [1, 2]}\nout: x\nd: null"
    second = "a: {b: 2, c: [1, 2]}\nout: y\ne: hello"
    assert _recipe_differences(first, second) == [("a.b", "1", "2"), ("d", "null", ""), ("e", "", "hello")]
    assert _recipe_differences("", "") == []
