from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from covpool.reproduce.miniature.tiny_imagenet import write_subset


def test_it_lists_some_classes(tiny_imagenet: Path, tmp_path: Path) -> None:
    write_subset(tiny_imagenet, 3, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["split"] for row in rows) == {"train": 120, "val": 60}
    assert len({row["label"] for row in rows}) == 3
    for row in rows:
        image = tmp_path / row["path"]
        assert image.is_file()
        assert row["label"] in str(image.resolve())  # of tiny10, which the links lead to


def test_moved_images_have_the_same_names(tiny_imagenet: Path, tmp_path: Path) -> None:
    write_subset(tiny_imagenet, 3, tmp_path / "a.csv")
    before = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "elsewhere").symlink_to(tiny_imagenet)
    write_subset(tmp_path / "elsewhere", 3, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes() == before


def test_the_same_classes_every_time(tiny_imagenet: Path, tmp_path: Path) -> None:
    for name in "ab":
        write_subset(tiny_imagenet, 4, tmp_path / f"{name}.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not Tiny-ImageNet, there is no .*wnids.txt: give --data"):
        write_subset(tmp_path, 3, tmp_path / "a.csv")


def test_too_many_classes(tiny_imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 10 classes, fewer than 11"):
        write_subset(tiny_imagenet, 11, tmp_path / "a.csv")
