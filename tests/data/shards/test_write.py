"""Writing shards: WebDataset format, unchanged image bytes, and the same index as one made later."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import write_shards
from tests.data.memory_images import MemoryImages, memory_images


def by_name(images: Any) -> dict[str, tuple[int, bytes]]:
    return {images.name(i): (int(images.labels[i]), images.read(i)) for i in range(len(images))}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    images = memory_images(40)
    index = write_shards(images, tmp_path / "shards", shard_bytes=15_000)
    assert len(index.shards) > 3
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
    found = open_shards(tmp_path / "shards")
    assert found.index == index
    assert found.classes == images.classes
    assert len(found) == 40
    assert by_name(found) == by_name(images)
    labels = np.asarray(found.labels)
    assert labels.dtype == np.int64
    assert labels.tolist() == list(found.labels) == [found.label(i) for i in range(40)]
    assert labels.tolist() != sorted(labels.tolist()), "classes are still one after the other"


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # WebDataset leaves tars open
def test_webdataset_reads_them(tmp_path: Path) -> None:
    images = memory_images(12)
    write_shards(images, tmp_path / "shards", shard_bytes=5_000)
    urls = sorted(str(path) for path in (tmp_path / "shards").glob("*.tar"))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    found = {}
    for sample in samples:
        metadata = json.loads(sample["json"])
        found[metadata["name"]] = (int(sample["cls"]), sample["png"])
        assert metadata["class"] == images.classes[int(sample["cls"])]
    assert found == by_name(images)
    assert len(samples) == 12
    gc.collect()


def test_shards_are_the_same_to_the_bit_each_time(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        write_shards(memory_images(), tmp_path / name, seed=seed)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert contents(tmp_path / "one") != contents(tmp_path / "other")


def test_endings_of_files(tmp_path: Path) -> None:
    names = ["a.JPEG", "b/c.tar.png", "no ending", "odd.cls", "../../up.webp", "a.jpg\udcff"]
    plain = memory_images(len(names))
    write_shards(dataclasses.replace(plain, names=names), tmp_path / "shards")
    with tarfile.open(tmp_path / "shards" / "00000.tar") as tar:
        members = [name for name in tar.getnames() if not name.endswith((".cls", ".json"))]
    assert sorted(name.partition(".")[2] for name in members) == ["img", "img", "img", "jpeg", "png", "webp"]
    found = open_shards(tmp_path / "shards")
    assert sorted(found.name(i) for i in range(len(found))) == sorted(names)


def test_a_folder_that_has_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists: use a new folder"):
        write_shards(memory_images(), tmp_path)
    with pytest.raises(ValueError, match="exists: use a new folder"):
        write_shards(memory_images(), tmp_path / "note.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    assert write_shards(memory_images(), tmp_path / "empty").counts == [20]


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    class Failing(MemoryImages):
        def read(self, i: int) -> bytes:
            raise FileNotFoundError(2, "No such file or directory", "a.png")

    failing = Failing(**vars(memory_images()))
    with pytest.raises(FileNotFoundError):
        write_shards(failing, tmp_path / "shards")
    assert not list(tmp_path.iterdir())


def test_a_percent_sign_in_the_path(tmp_path: Path) -> None:
    write_shards(memory_images(), tmp_path / "50%d" / "shards")
    assert len(open_shards(tmp_path / "50%d" / "shards")) == 20


def test_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_shards(memory_images(4), tmp_path / "shards", progress=lambda *numbers: calls.append(numbers))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list open files")
def test_no_file_stays_open(tmp_path: Path) -> None:
    write_shards(memory_images(), tmp_path / "shards", shard_bytes=4_000)
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.realpath(link).startswith(str(tmp_path))]
