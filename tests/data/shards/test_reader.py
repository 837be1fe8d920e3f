"""Reading shards from disk, from object storage through the cache, and in forked or spawned processes."""

from __future__ import annotations

import functools
import gc
import http.server
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from covpool.data.image_set import ImageSet
from covpool.data.shards import reader
from covpool.data.shards.index import read_contents
from covpool.data.shards.reader import ShardSet, open_shards
from covpool.data.shards.write import write_shards
from covpool.errors import BadImageError, ShardError
from tests.data.memory_images import memory_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(memory_images(40), tmp_path / "shards", shard_bytes=8_000)
    return tmp_path / "shards"


@pytest.fixture
def memory_url(folder: Path) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/bucket/train", recursive=True)
    yield "memory://bucket/train"
    memory.rm("/bucket", recursive=True)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serve a folder, and record the requested paths."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def http_url(folder: Path) -> Iterator[tuple[str, list[str]]]:
    pytest.importorskip("aiohttp", reason="fsspec reads http by it")
    handler = type("Serving", (Handler,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()
    server.server_close()
    thread.join()


def everything(images: ImageSet) -> list[tuple[str, int, bytes]]:
    return [(images.name(i), int(images.labels[i]), images.read(i)) for i in range(len(images))]


def test_it_is_a_set_of_images(folder: Path) -> None:
    found = open_shards(folder)
    assert isinstance(found, ImageSet)
    for i in (-1, 40):
        with pytest.raises(IndexError, match=f"^there are 40 samples; got {i}$"):
            found.read(i)
    assert found.labels[-1] == found.label(39)
    assert list(found.labels[10:20]) == np.asarray(found.labels)[10:20].tolist()
    shards = [found.near(i) for i in range(40)]
    assert all(i in near for i, near in enumerate(shards))
    assert sum(map(len, set(shards))) == 40
    assert len(set(shards)) == len(found.index.shards) > 5


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_disk_is_read_in_place(folder: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    assert sorted(everything(open_shards(f"{prefix}{folder}"))) == sorted(everything(memory_images(40)))
    assert not (folder.parent / "cache").exists()


def test_few_tars_are_open_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "OPEN_TARS", 2)
    monkeypatch.setattr(reader, "KEPT_CONTENTS", 3)
    found = open_shards(folder)
    order = np.random.default_rng(0).permutation(40)
    expected = everything(open_shards(folder))
    assert [(found.name(i), found.label(i), found.read(i)) for i in order] == [expected[i] for i in order]
    assert len(found._tars._values) == 2
    assert len(found._contents._values) == 3


def test_a_store_is_downloaded_shard_by_shard(memory_url: str, folder: Path, tmp_path: Path) -> None:
    found = open_shards(memory_url, cache=tmp_path / "cache")
    first = found.read(0)
    assert len(list((tmp_path / "cache").iterdir())) == 2, "one shard and its index"
    assert everything(found) == everything(open_shards(folder))
    assert found.read(0) == first
    assert len(list((tmp_path / "cache").iterdir())) == 2 * len(found.index.shards)
    # Downloaded files are not requested again, even if the storage has only its index left.
    for shard in found.index.shards:
        fsspec.filesystem("memory").rm(f"/bucket/train/{shard.name}")
    assert everything(open_shards(memory_url, cache=tmp_path / "cache")) == everything(found)


def test_the_cache_stays_within_its_limit(memory_url: str, folder: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in folder.glob("*.tar"))
    found = open_shards(memory_url, cache=tmp_path / "cache", cache_bytes=3 * largest)
    for i in range(len(found)):
        found.read(i)
        found._tars._shrink(1)  # as if only a few were kept open
        found._contents._shrink(0)
        assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 3 * largest + 5000
    with pytest.raises(ShardError, match="does not fit the cache of 1,000"):
        open_shards(memory_url, cache=tmp_path / "cache", cache_bytes=1000)


def test_the_usual_cache_folder(memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    open_shards(memory_url).read(0)
    assert len(list((tmp_path / "xdg" / "covpool" / "shards").iterdir())) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    open_shards(memory_url).read(0)
    assert len(list((tmp_path / "home" / ".cache" / "covpool" / "shards").iterdir())) == 2


def test_a_shard_of_a_store_that_is_not_the_indexed_one(memory_url: str, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    found = open_shards(memory_url, cache=tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("covpool.storage.remote.RETRIES", 0)
        memory.pipe_file("/bucket/train/00000.tar", b"short")
        with pytest.raises(
            ShardError, match=r"00000\.tar cannot be read: it has 5 bytes, but the index lists"
        ):
            found.read(0)
        memory.rm_file("/bucket/train/00001.tar.json")
        with pytest.raises(ShardError, match=r"00001\.tar\.json does not exist$"):
            found.read(found.index.shards[0].samples)
        memory.rm_file("/bucket/train/index.json")
        with pytest.raises(ShardError, match=r"index\.json does not exist$"):
            open_shards(memory_url, cache=tmp_path / "cache")


def test_a_place_that_cannot_be_opened() -> None:
    with pytest.raises(ShardError, match=r"^s3://bucket/train cannot be opened: Install s3fs"):
        open_shards("s3://bucket/train")
    with pytest.raises(ShardError, match=r"^ftpx://a cannot be opened: Protocol not known"):
        open_shards("ftpx://a")


def test_an_image_that_is_too_large_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_FILE_BYTES", 1000)
    with pytest.raises(BadImageError, match=r"^it has [\d,]+ bytes in 00000\.tar$") as caught:
        open_shards(folder).read(0)
    assert caught.value.reason == "too large"


def test_pickled_it_is_small_and_starts_with_nothing_open(folder: Path) -> None:
    found = open_shards(folder)
    before = len(pickle.dumps(found))
    expected = everything(found)
    data = pickle.dumps(found)
    assert len(data) == before < 3000
    copy = pickle.loads(data)
    assert not copy._tars._values
    assert everything(copy) == expected


def _read(images: ShardSet, results: multiprocessing.SimpleQueue[object]) -> None:
    results.put(everything(images))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_from_a_web_server_by_several_processes(
    http_url: tuple[str, list[str]], folder: Path, tmp_path: Path, method: str
) -> None:
    url, asked = http_url
    found = open_shards(url, cache=tmp_path / "cache")
    found.read(0)  # so that the processes inherit an open file
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    processes = [context.Process(target=_read, args=(found, results)) for _ in range(2)]
    for process in processes:
        process.start()
    received = [results.get() for _ in processes]
    for process in processes:
        process.join(60)
    expected = everything(open_shards(folder))
    assert received == [expected, expected]
    assert everything(found) == expected
    whole = [path for path in asked if not path.endswith("index.json")]
    assert len(set(whole)) == 2 * len(found.index.shards)
    assert len(whole) == len(set(whole)), "something was downloaded twice"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list open files")
def test_nothing_stays_open_without_the_set(folder: Path) -> None:
    found = open_shards(folder)
    everything(found)
    del found
    gc.collect()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.realpath(link).startswith(str(folder))]


def test_swapped_blocks_are_noticed(folder: Path) -> None:
    """A plain sum of the words would not notice them."""
    images = open_shards(folder)
    contents = read_contents((folder / "00000.tar.json").read_bytes(), images.index.shards[0], 3)
    tar, start = folder / "00000.tar", int(contents.offsets[0])
    data = bytearray(tar.read_bytes())
    data[start : start + 16] = data[start + 8 : start + 16] + data[start : start + 8]
    tar.write_bytes(data)
    with pytest.raises(BadImageError, match="holds other bytes than when it was indexed"):
        open_shards(folder).read(0)
