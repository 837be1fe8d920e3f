"""The index format: plain JSON; an invalid index is refused with an error message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covpool.data.shards.index import checksum, digest, read_contents, read_index, write_contents, write_index
from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import index_shards, write_shards
from covpool.errors import ShardError, TooLargeError
from tests.data.memory_images import memory_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(memory_images(), tmp_path / "shards", shard_bytes=6_000)
    return tmp_path / "shards"


def test_what_is_written_is_what_is_read(folder: Path) -> None:
    data = (folder / "index.json").read_bytes()
    index = read_index(data)
    assert write_index(index) == data
    for shard in index.shards:
        part = (folder / f"{shard.name}.json").read_bytes()
        assert write_contents(read_contents(part, shard, 3)) == part


def test_the_format_is_pinned(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    assert list(index) == ["format", "version", "classes", "shards", "left_out"]
    assert (index["format"], index["version"]) == ("covpool shards", 2)
    assert list(index["shards"][0]) == ["name", "bytes", "samples", "contents"]
    part = json.loads((folder / "00000.tar.json").read_text())
    assert list(part) == ["format", "version", "offsets", "sizes", "checksums", "labels", "names"]


def changed(data: bytes, change: Callable[[Any], object]) -> bytes:
    fields = json.loads(data)
    change(fields)
    return json.dumps(fields).encode()


def set_first_shard(**values: object) -> Callable[[Any], None]:
    return lambda fields: fields["shards"][0].update(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: f.update(format="tar"), "index.json is not a shard index written by covpool"),
        (lambda f: f.update(version=1), "index.json has version 1; this covpool reads version 2; .*"),
        (lambda f: f.pop("classes"), "index.json has no classes"),
        (lambda f: f.update(shards={}), "index.json has no shards"),
        (lambda f: f.update(classes=[1]), "index.json has a class whose name is not a string"),
        (
            lambda f: f["shards"].append(3),
            "index.json has a shard without its name, bytes, samples, contents",
        ),
        (set_first_shard(extra=1), "index.json has a shard without its name, bytes, samples, contents"),
        (set_first_shard(bytes=-1), "index.json has no size or no number of samples for 00000.tar"),
        (set_first_shard(samples=True), "index.json has no size or no number of samples for 00000.tar"),
        (set_first_shard(samples=2**62), "index.json has no size or no number of samples for 00000.tar"),
        (set_first_shard(contents=None), "index.json has no SHA-256 for 00000.tar"),
        *[
            (
                set_first_shard(name=name),
                "index.json has a shard named .*, which is not a plain file name",
            )
            for name in ("../x.tar", "/etc/passwd", "..", "", "a\\b", "c:x", "a\0b", 3)
        ],
    ],
)
def test_an_index_that_is_not_ours(folder: Path, change: Callable[[Any], object], sentence: str) -> None:
    data = changed((folder / "index.json").read_bytes(), change)
    (folder / "index.json").write_bytes(data)
    with pytest.raises(ShardError, match=f"^{sentence}$"):
        open_shards(folder)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'{"a": ' * 5000, b"1" * 5000], ids=len
)
def test_an_index_that_is_damaged(data: bytes) -> None:
    with pytest.raises(ShardError, match=r"^index\.json is (truncated or damaged|not a shard index)"):
        read_index(data)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: f["names"].pop(), "does not list . samples, as index.json does"),
        (lambda f: f["labels"].append(0), "does not list . samples, as index.json does"),
        (lambda f: f["names"].__setitem__(0, None), "has a sample whose name is not a string"),
        (lambda f: f["labels"].__setitem__(0, 3), "has a label beyond the 3 classes of index.json"),
        (lambda f: f["labels"].__setitem__(0, -1), "has labels that are not integers of at least 0"),
        (lambda f: f["sizes"].__setitem__(0, 1.5), "has sizes that are not integers of at least 0"),
        (lambda f: f["sizes"].__setitem__(0, 2**62 - 1), "lists an image outside its tar"),
        (lambda f: f["sizes"].__setitem__(0, 2**64), "has sizes that are not integers of at least 0"),
        (lambda f: f["offsets"].__setitem__(0, 2**62 - 1), "lists an image outside its tar"),
        (lambda f: f["offsets"].__setitem__(0, "1"), "has offsets that are not integers of at least 0"),
        (lambda f: f.pop("checksums"), "has no checksums"),
    ],
)
def test_contents_that_are_not_ours(folder: Path, change: Callable[[Any], object], sentence: str) -> None:
    data = changed((folder / "00000.tar.json").read_bytes(), change)
    (folder / "00000.tar.json").write_bytes(data)
    with pytest.raises(
        ShardError, match=r"^00000\.tar\.json is not the file that index\.json was made with; "
    ):
        open_shards(folder).read(0)
    # Update the digest in the index, so that the contents themselves are checked.
    known = changed((folder / "index.json").read_bytes(), set_first_shard(contents=digest(data)))
    (folder / "index.json").write_bytes(known)
    with pytest.raises(ShardError, match=rf"^00000\.tar\.json {sentence}"):
        open_shards(folder).read(0)


def test_indexes_have_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("covpool.data.shards.reader.MAX_CONTENTS_BYTES", 100)
        with pytest.raises(ShardError, match=r"^00000\.tar\.json has more than 100 bytes"):
            open_shards(folder).read(0)
    monkeypatch.setattr("covpool.data.shards.index.MAX_INDEX_BYTES", 100)
    with pytest.raises(TooLargeError, match=r"index\.json has more than 100 bytes"):
        open_shards(folder)


def test_a_tar_that_changed_its_size(folder: Path) -> None:
    with (folder / "00001.tar").open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        ShardError, match=r"00001\.tar has .* bytes, but index\.json lists .* 'covpool shard --index'"
    ):
        open_shards(folder)
    with (folder / "00001.tar").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ShardError, match=r"00001\.tar has 100 bytes, but index\.json lists"):
        open_shards(folder)
    (folder / "00001.tar").unlink()
    with pytest.raises(ShardError, match=r"00001\.tar is missing, but index\.json lists it"):
        open_shards(folder)
    index_shards([folder])
    assert len(open_shards(folder)) < 20


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r" has no index\.json; 'covpool shard --index' makes a new one"):
        open_shards(tmp_path)


@given(st.binary(min_size=16, max_size=100), st.data())
def test_a_checksum_tells_flipped_bits_and_swapped_blocks(data: bytes, drawn: st.DataObject) -> None:
    place = drawn.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[place // 8] ^= 1 << place % 8
    assert checksum(bytes(flipped)) != checksum(data)
    swapped = data[8:16] + data[:8] + data[16:]
    assert (checksum(swapped) != checksum(data)) == (swapped != data)


def test_an_index_that_does_not_tell_what_it_leaves_out_leaves_out_nothing(folder: Path) -> None:
    """Earlier versions wrote such indexes."""
    fields = json.loads((folder / "index.json").read_bytes())
    del fields["left_out"]
    assert read_index(json.dumps(fields).encode()).left_out == 0
