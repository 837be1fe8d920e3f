"""Indexes for existing tars: the index written with the tars, and one for tars of other programs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import index_shards, tar_folders, write_shards
from covpool.errors import ShardError
from tests.data.memory_images import memory_images


def test_the_index_can_be_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    write_shards(memory_images(30), folder, shard_bytes=8_000)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path in folder.glob("*.json"):
        path.unlink()
    (index,), left_out = index_shards([folder])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert left_out == 0
    assert index.classes == ("a", "b", "c")


def test_names_of_classes_for_others_tars(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    write_shards(memory_images(), folder)
    (index,), _ = index_shards([folder], classes=["jay", "wren", "tit", "crow"])
    assert open_shards(folder).classes == index.classes == ("jay", "wren", "tit", "crow")
    with pytest.raises(ShardError, match="there are 2 class names, but labels up to 2"):
        index_shards([folder], classes=["jay", "wren"])


def test_several_folders_have_the_same_classes(tmp_path: Path) -> None:
    for split, labels in (("train", [0, 0, 1]), ("val", [0, 0, 3])):
        images = dataclasses.replace(memory_images(3), labels=np.array(labels), classes=tuple("abcd"))
        write_shards(images, tmp_path / split)
    folders = tar_folders(tmp_path)
    assert folders == [tmp_path / "train", tmp_path / "val"]
    indexes, _ = index_shards(folders)
    assert [index.classes for index in indexes] == [("a", "b", "2", "d")] * 2


def test_folders_of_tars(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"has no tars$"):
        tar_folders(tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(ShardError, match=r"has no tars: a\.tar\.gz is compressed, decompress it first$"):
        tar_folders(tmp_path)
    (tmp_path / "b.tar").write_bytes(b"")
    assert tar_folders(tmp_path) == [tmp_path]
