"""Folders of classes, with and without splits."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from covpool.data.check import strays
from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.sources import layout_of, open_images, open_splits, open_unlabeled, splits
from tests.data.pictures import SPARROWS, TINY10, jpeg, needs_sparrows, needs_tiny10
from tests.data.trees import plant, write


def content(images: ImageSet) -> list[tuple[str, str]]:
    """Return the names and classes of the images."""
    return [(images.name(i), images.classes[int(images.labels[i])]) for i in range(len(images))]


def test_splits(tmp_path: Path) -> None:
    plant(
        tmp_path,
        "train/wren/2.jpg",
        "train/wren/10.jpg",
        "train/Jay/1.JPG",
        "val/Jay/1.jpg",
        "test/wren/1.jpg",
    )
    plant(tmp_path, "README.txt", "train/wren/notes.txt", "annotations/a.txt", "train/.hidden/a.jpg")
    plant(tmp_path, "train/wren/.hidden.jpg", "__MACOSX/train/wren/1.jpg", "train/__MACOSX/1.jpg")
    assert layout_of(tmp_path) == "folder"
    assert splits(tmp_path) == ("train", "val", "test")
    train = open_images(tmp_path)
    assert isinstance(train, ImageFiles)
    assert train.classes == ("Jay", "wren")
    assert content(train) == [
        ("train/Jay/1.JPG", "Jay"),
        ("train/wren/10.jpg", "wren"),
        ("train/wren/2.jpg", "wren"),
    ]
    assert train.labels.dtype == np.int32
    assert train.read(1) == (tmp_path / "train" / "wren" / "10.jpg").read_bytes()
    assert content(open_images(tmp_path, "test")) == [("test/wren/1.jpg", "wren")]
    assert open_images(tmp_path, "val").classes == ("Jay", "wren")


def test_several_splits_as_one(tmp_path: Path) -> None:
    plant(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/2.jpg", "test/b/3.jpg")
    joined = open_images(tmp_path, "train+val")
    assert content(joined) == [("train/a/1.jpg", "a"), ("train/b/1.jpg", "b"), ("val/a/2.jpg", "a")]
    assert len(open_images(tmp_path, "train+train")) == 2


def test_one_folder(tmp_path: Path) -> None:
    plant(tmp_path, "wren/1.jpg", "jay/deep/down/1.jpg", "jay/2.png")
    assert splits(str(tmp_path)) == ("train",)
    assert content(open_images(str(tmp_path))) == [
        ("jay/2.png", "jay"),
        ("jay/deep/down/1.jpg", "jay"),
        ("wren/1.jpg", "wren"),
    ]


def test_other_names_of_splits(tmp_path: Path) -> None:
    plant(tmp_path, "Training/a/1.jpg", "valid/a/1.jpg", "TEST/a/1.jpg")
    assert splits(tmp_path) == ("train", "val", "test")
    assert open_images(tmp_path, "validation").name(0) == "valid/a/1.jpg"


def test_what_is_beside_the_splits_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant(tmp_path, "train/jay/a.jpg", "dev/jay/b.jpg", "extra/jay/c.jpg", "notes/d.txt")
    assert {split: len(images) for split, images in open_splits(tmp_path).items()} == {"train": 1, "val": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'extra'} is left out: it is next to folders of splits, but is not a split"
    ]
    found = strays(tmp_path, Counter())
    assert [(path, what) for path, what, _ in found] == [("extra/jay/c.jpg", "no class")]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    plant(tmp_path, "train/1.jpg", "plane/1.jpg")
    assert open_images(tmp_path).classes == ("plane", "train")


def test_a_test_split_alone(tmp_path: Path) -> None:
    plant(tmp_path, "test/a/1.jpg", "test/b/1.jpg")
    assert splits(tmp_path) == ("test",)
    assert open_images(tmp_path, "test").classes == ("a", "b")


@needs_sparrows
def test_as_torchvision_has_it() -> None:
    for split in ("train", "test"):
        ours, theirs = open_images(SPARROWS, split), ImageFolder(SPARROWS / split)
        assert list(ours.classes) == theirs.classes
        paths = [(str(SPARROWS / ours.name(i)), int(ours.labels[i])) for i in range(len(ours))]
        assert paths == theirs.samples


@needs_tiny10
def test_tiny10() -> None:
    sets = open_splits(TINY10)
    assert {split: len(images) for split, images in sets.items()} == {"train": 5000, "val": 500}


@pytest.fixture
def scrambled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes the file system list names in reverse order."""

    class Backwards:
        def __init__(self, path: Any) -> None:
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return iter(self.entries)

        def __exit__(self, *error: object) -> None:
            pass

    scandir = os.scandir
    return lambda: monkeypatch.setattr(os, "scandir", Backwards)


def test_the_order_is_not_the_file_systems(tmp_path: Path, scrambled: Callable[[], None]) -> None:
    plant(tmp_path, *(f"{c}/{i}.jpg" for c in "bca" for i in (3, 1, 20)), "é/ä.jpg", "é/z.jpg", "é/b/a.jpg")
    before = content(open_images(tmp_path))
    scrambled()
    assert content(open_images(tmp_path)) == before
    assert [name for name, _ in before][:3] == ["a/1.jpg", "a/20.jpg", "a/3.jpg"]
    assert [name for name, _ in before][-3:] == ["é/z.jpg", "é/ä.jpg", "é/b/a.jpg"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems store names as they please")
def test_accents_stored_apart(tmp_path: Path) -> None:
    # macOS stores "é" as e and an accent. It must be sorted and named like "é" on other systems.
    plant(tmp_path, "train/fe\u0301e/1.jpg", "train/fz/1.jpg", "test/f\u00e9e/1.jpg")
    assert open_images(tmp_path).classes == ("fz", "f\u00e9e")
    assert content(open_images(tmp_path, "test")) == [("test/f\u00e9e/1.jpg", "f\u00e9e")]
    assert open_images(tmp_path).read(1) == (tmp_path / "train" / "fe\u0301e" / "1.jpg").read_bytes()
    plant(tmp_path, "test/fz/fz.jpg", "test/fz/fe\u0301.jpg")
    assert [name for name, _ in content(open_images(tmp_path, "test"))[:2]] == [
        "test/fz/fz.jpg",
        "test/fz/fe\u0301.jpg",
    ]
    plant(tmp_path, "train/f\u00e9e/2.jpg")
    with pytest.raises(ValueError, match="two folders 'f\u00e9e' with different Unicode bytes"):
        open_images(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems want UTF-8")
def test_names_that_are_no_text(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg")
    with open(os.fsencode(tmp_path) + b"/a/\xff\xfe.jpg", "wb") as file:
        file.write(jpeg((1, 2, 3)))
    images = open_images(tmp_path)
    assert [images.name(i) for i in range(2)] == ["a/1.jpg", "a/\udcff\udcfe.jpg"]
    assert images.read(1) == jpeg((1, 2, 3))


def test_links_are_followed(tmp_path: Path) -> None:
    plant(tmp_path / "store", "all/1.jpg", "all/2.jpg")
    write(tmp_path / "set" / "a" / "own.jpg", jpeg((1, 2, 3)))
    (tmp_path / "set" / "a" / "linked.jpg").symlink_to(tmp_path / "store" / "all" / "1.jpg")
    (tmp_path / "set" / "b").symlink_to(tmp_path / "store" / "all")
    images = open_images(tmp_path / "set")
    assert [images.name(i) for i in range(len(images))] == ["a/linked.jpg", "a/own.jpg", "b/1.jpg", "b/2.jpg"]
    assert images.read(0) == images.read(2)


def test_links_to_nowhere_are_listed(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "2.jpg").symlink_to(tmp_path / "gone.jpg")
    images = open_images(tmp_path)
    assert len(images) == 2
    with pytest.raises(FileNotFoundError):
        images.read(1)


def test_links_in_a_circle(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg", "b/1.jpg")
    (tmp_path / "a" / "over").symlink_to(tmp_path / "b")
    assert len(open_images(tmp_path)) == 3
    (tmp_path / "b" / "back").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="is a link back to a folder above it: remove it"):
        open_images(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg")
    os.mkfifo(tmp_path / "a" / "2.jpg")
    assert len(open_images(tmp_path)) == 1


def test_no_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, *(f"a/{i}.jpg" for i in range(50)))
    asked = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: asked.append(path) or stat(path, **options))
    assert len(open_images(tmp_path)) == 50
    assert not [path for path in asked if str(path).endswith(".jpg")]


NO_CLASSES = (
    "has no folders of classes: put the images of each class into a folder with its name, or list them"
)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], f"ROOT {NO_CLASSES}"),
        (["1.jpg", "2.jpg"], f"ROOT {NO_CLASSES}"),
        (["train/1.jpg", "test/1.jpg"], f"ROOT/t(rain|est) {NO_CLASSES}"),
        (["a/notes.txt"], "ROOT has no images"),
        (["val/a/1.jpg", "valid/a/1.jpg"], "ROOT has two folders for val, val and valid: keep one"),
        (
            ["train/a/1.jpg", "test/a/1.jpg", "test/b/1.jpg", "test/c/1.jpg"],
            "ROOT has no training images of 2 of its 3 classes, first of 'b': add some, or take the",
        ),
        (["a/1.jpg", "b/notes.txt"], "ROOT has no training images of 1 of its 2 classes, first of 'b'"),
        (["train/a/1.jpg", "test/1.jpg"], "ROOT has no split 'test'; it has train"),
        (["train/a/1.jpg"], "ROOT has no split 'test'; it has train"),
    ],
)
def test_mistakes(names: list[str], sentence: str, tmp_path: Path) -> None:
    plant(tmp_path, *names)
    with pytest.raises(ValueError, match=f"^{sentence.replace('ROOT', str(tmp_path))}"):
        open_images(tmp_path, "test" if "'test'" in sentence else "train")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_images(tmp_path / "none")
    plant(tmp_path, "notes.txt")
    with pytest.raises(ValueError, match=r"notes\.txt is neither a folder nor a CSV"):
        open_images(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"notes\.txt is not an image"):
        open_unlabeled(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"^no image matches .*\*\.JPEG$"):
        open_unlabeled(tmp_path / "*.JPEG")
    with pytest.raises(
        ValueError, match="layout must be one of csv, shards, cub, aircraft, cars, parquet, folder; got 'zip'"
    ):
        open_images(tmp_path, layout="zip")
