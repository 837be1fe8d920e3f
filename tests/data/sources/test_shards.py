"""Shards as a source of images: their splits, on disk and in object storage."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from covpool.data.check import check
from covpool.data.image_set import ImageSet
from covpool.data.shards.write import write_shards
from covpool.data.sources import layout_of, open_splits
from covpool.errors import ShardError, UsageError
from covpool.training.recipe import DataOptions
from covpool.training.splits import open_data
from tests.data.memory_images import memory_images

COUNTS = {"train": 30, "val": 12, "test": 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in COUNTS.items():
        write_shards(memory_images(count), tmp_path / "birds" / split, shard_bytes=8_000)
    return tmp_path / "birds"


@pytest.fixture
def url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same shards in object storage, with retries that do not pause."""
    monkeypatch.setattr("covpool.storage.remote.pauses_before", lambda retries: (0.0,))
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/bucket/birds", recursive=True)
    yield "memory://bucket/birds"
    memory.rm("/bucket", recursive=True)


def counts(sets: Any) -> dict[str, int]:
    return {split: len(images) for split, images in sets.items()}


def everything(images: ImageSet) -> list[tuple[str, int, bytes]]:
    return [(images.name(i), int(images.labels[i]), images.read(i)) for i in range(len(images))]


def test_a_store_has_the_splits_of_the_folder(folder: Path, url: str, tmp_path: Path) -> None:
    assert layout_of(url) == "shards"
    cache = tmp_path / "cache"
    for address in (url, f"{url}/", f"file://{folder}"):
        found, expected = open_splits(address, cache=cache), open_splits(folder)
        assert list(found) == list(expected) == ["train", "val", "test"]
        for split in expected:
            assert everything(found[split]) == everything(expected[split])
    assert len(list(cache.glob("*.covpool-shard"))) == 2 * len(list(folder.rglob("*.tar")))


def test_an_address_of_one_split(url: str, tmp_path: Path) -> None:
    assert counts(open_splits(f"{url}/val", cache=tmp_path)) == {"train": 12}


def test_an_address_with_some_splits(url: str, tmp_path: Path) -> None:
    fsspec.filesystem("memory").rm("/bucket/birds/val", recursive=True)
    assert counts(open_splits(url, cache=tmp_path)) == {"train": 30, "test": 9}


def test_nothing_there(url: str) -> None:
    for address in (f"{url}/none", "memory://none"):
        with pytest.raises(ValueError, match=rf"^{address} has no index\.json: 'covpool shard' writes"):
            open_splits(address)
    with pytest.raises(UsageError, match=r"^s3://bucket/birds cannot be opened: Install s3fs"):
        open_splits("s3://bucket/birds")
    with pytest.raises(UsageError, match=r"^no-such://x cannot be opened: Protocol not known"):
        open_splits("no-such://x")


@pytest.mark.parametrize(
    ("error", "is_absent"),
    [(PermissionError("Forbidden"), True), (ConnectionResetError("reset by peer"), False)],
)
def test_a_store_that_does_not_tell(
    url: str, error: Exception, is_absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, *arguments: Any, **options: Any) -> bytes:
        if path.endswith("/val/index.json"):
            raise error
        content: bytes = real(self, path, *arguments, **options)
        return content

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    if is_absent:
        assert counts(open_splits(url, cache=tmp_path)) == {"train": 30, "test": 9}
        return
    # A lost connection must not remove a split.
    with pytest.raises(ShardError, match=r"/val/index\.json cannot be read: reset by peer$"):
        open_splits(url, cache=tmp_path)


class _Server(http.server.SimpleHTTPRequestHandler):
    """Serve a folder, and answer 403 for missing files, like a public bucket that nobody may list."""

    def send_error(self, code: int, *arguments: Any, **options: Any) -> None:
        super().send_error(403 if code == 404 else code, *arguments, **options)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_web_server(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http by it")
    handler = functools.partial(_Server, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        sets = open_splits(f"http://127.0.0.1:{server.server_port}", cache=tmp_path / "cache")
        assert counts(sets) == COUNTS
        assert sets["val"].read(3)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_training_reads_a_store_through_the_recipes_cache(url: str, tmp_path: Path) -> None:
    splits = open_data(DataOptions(path=url, cache=str(tmp_path / "mine")), seed=0)
    assert {name: len(images) for name, images in splits.sets().items()} == COUNTS
    assert splits.train.read(0)
    assert list((tmp_path / "mine").glob("*.covpool-shard"))


def test_check_sees_all_splits(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = check(url)
    assert report.images == COUNTS
    assert report.counts == {"leak": 21}


@pytest.mark.parametrize("folder", ["shards", "shards/train"])
def test_other_folders_next_to_shards(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "shards" / "notes" / "old").mkdir(parents=True)
    (tmp_path / folder / "index.json").write_text("{}")
    assert layout_of(tmp_path / "shards") == "folder"  # an index of another program
    (tmp_path / folder / "0.tar").write_bytes(b"")
    assert layout_of(tmp_path / "shards") == "shards"
