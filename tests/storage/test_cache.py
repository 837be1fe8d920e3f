"""The cache of remote files: complete, downloaded once per machine, limited in size, safe for readers."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from covpool.errors import ShardError
from covpool.storage import cache as cache_module
from covpool.storage.cache import FileCache


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """Object storage with ten files of 100 bytes, without pauses between retries."""
    monkeypatch.setattr("covpool.storage.remote.pauses_before", lambda retries: (0.0, 0.0))
    memory = fsspec.filesystem("memory")
    for i in range(10):
        memory.pipe_file(f"/cache-test/{i}", bytes([i]) * 100)
    yield memory
    memory.rm("/cache-test", recursive=True)


def url(i: int) -> str:
    return f"memory://cache-test/{i}"


def files(folder: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in folder.iterdir())


def get(cache: FileCache, i: int) -> bytes:
    with open(cache.opened(url(i), "v1", 100), "rb") as file:
        return file.read()


def count_downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    downloads: list[str] = []
    real = MemoryFileSystem.get_file

    def get_file(self: Any, remote: str, local: str, **options: Any) -> None:
        downloads.append(remote)
        real(self, remote, local, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    return downloads


def test_a_file_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = count_downloads(monkeypatch)
    cache = FileCache(tmp_path / "new" / "cache", 1000)
    assert [get(cache, 3) for _ in range(3)] == [bytes([3]) * 100] * 3
    assert get(FileCache(tmp_path / "new" / "cache", 1000), 3) == bytes([3]) * 100
    assert downloads == ["/cache-test/3"]
    # Another version at the same URL is another file.
    os.close(cache.opened(url(3), "v2", 100))
    assert len(downloads) == 2


def test_the_file_opened_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 350)
    for i in (0, 1, 2):
        get(cache, i)
        time.sleep(0.01)
    get(cache, 0)
    time.sleep(0.01)
    get(cache, 3)
    assert files(tmp_path) == [bytes([i]) * 100 for i in (0, 2, 3)]


def test_there_is_room_before_a_download_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryFileSystem.get_file
    found: list[int] = []

    def get_file(self: Any, remote: str, local: str, **options: Any) -> None:
        found.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
        real(self, remote, local, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    for i in range(5):
        get(FileCache(tmp_path, 250), i)
    assert found == [0, 100, 100, 100, 100]


def test_a_file_that_comes_while_we_look_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = count_downloads(monkeypatch)
    real = cache_module._hold

    def hold(path: Path, flags: int, lock: int) -> int | None:
        if path.suffix == cache_module.PART:
            monkeypatch.setattr(cache_module, "_hold", real)
            get(FileCache(tmp_path, 1000), 0)  # like another, slightly faster process
        return real(path, flags, lock)

    monkeypatch.setattr(cache_module, "_hold", hold)
    assert get(FileCache(tmp_path, 1000), 0) == bytes([0]) * 100
    assert len(downloads) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_in_use_stays(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 250)
    held = [cache.opened(url(i), "v1", 100) for i in (0, 1, 2)]
    # The total exceeds the limit, because all files are in use.
    assert files(tmp_path) == [bytes([i]) * 100 for i in (0, 1, 2)]
    os.close(held[1])
    get(cache, 3)
    assert files(tmp_path) == [bytes([i]) * 100 for i in (0, 2, 3)]
    os.close(held[0])
    os.close(held[2])
    get(cache, 4)
    assert len(files(tmp_path)) == 2


def test_leftovers_of_a_killed_process_go_first(tmp_path: Path) -> None:
    (tmp_path / "0123.covpool-part").write_bytes(b"half" * 50)
    os.utime(tmp_path / "0123.covpool-part", (0, 0))
    cache = FileCache(tmp_path, 250)
    for i in (0, 1):
        get(cache, i)
    assert files(tmp_path) == [bytes([i]) * 100 for i in (0, 1)]


def test_a_download_that_was_killed_begins_anew(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 1000)
    get(cache, 0)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.with_suffix(".covpool-part").write_bytes(b"half" * 50)
    assert get(cache, 0) == bytes([0]) * 100
    assert list(tmp_path.iterdir()) == [path]


def test_a_store_that_fails_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    real = MemoryFileSystem.get_file

    def get_file(self: Any, remote: str, local: str, **options: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionResetError("reset by peer")
        if len(tries) == 2:
            Path(local).write_bytes(b"cut short")
        else:
            real(self, remote, local, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    assert get(FileCache(tmp_path, 1000), 0) == bytes([0]) * 100
    assert len(tries) == 3


def test_a_store_that_fails_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path, 1000)
    with pytest.raises(ShardError, match=r"^memory://cache-test/99 does not exist$"):
        cache.opened(url(99), "v1", 100)
    sentence = "^memory://cache-test/1 cannot be read: it has 100 bytes, but the index lists 101$"
    with pytest.raises(ShardError, match=sentence):
        cache.opened(url(1), "v1", 101)
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *_, **__: os.read(-1, 1))
    with pytest.raises(ShardError, match=r"^memory://cache-test/1 cannot be read: .*Bad file descriptor$"):
        cache.opened(url(1), "v1", 100)
    assert not list(tmp_path.iterdir())


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_bytes(b"all of it" * 100)
    (tmp_path / "photos").mkdir()
    cache = FileCache(tmp_path, 250)
    for i in (0, 1, 2):
        get(cache, i)
    assert sorted(path.name for path in tmp_path.iterdir() if "covpool" not in path.name) == [
        "photos",
        "thesis.tex",
    ]
    assert len(list(tmp_path.glob("*.covpool-shard"))) == 2


def test_a_cache_that_is_tidied_up(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", 1000)
    get(cache, 0)
    shutil.rmtree(tmp_path / "cache")
    assert get(cache, 0) == bytes([0]) * 100
    # An unusable cache is not an unreadable image: the run should stop.
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ShardError, match=r"^the cache in .* cannot be used: "):
        get(cache, 0)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ShardError, match=r"^the cache in .* cannot be used: .*Function not implemented"):
        get(FileCache(tmp_path, 1000), 0)


def test_a_package_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"^s3://bucket/0\.tar needs a package: Install s3fs"):
        FileCache(tmp_path, 1000).opened("s3://bucket/0.tar", "v1", 100)


def _work(folder: Path, source: Path, log: Path, barrier: Any, number: int) -> None:
    """Open all files repeatedly, starting at file ``number``, and log every download."""
    from fsspec.implementations.local import LocalFileSystem

    real = LocalFileSystem.get_file

    def get_file(self: Any, remote: str, local: str, **options: Any) -> None:
        with log.open("a") as file:
            file.write(f"{Path(remote).name}\n")
        time.sleep(0.02)
        real(self, remote, local, **options)

    LocalFileSystem.get_file = get_file
    cache = FileCache(folder, 10_000 if number < 10 else 350)
    barrier.wait()
    for i in range(20):
        j = (i + number) % 5
        with open(cache.opened(f"file://{source}/{j}", "v1", 100), "rb") as file:
            assert file.read() == bytes([j]) * 100


@pytest.mark.parametrize(("first", "limited"), [(0, False), (10, True)], ids=["roomy", "narrow"])
def test_processes_share_a_cache(tmp_path: Path, first: int, limited: bool) -> None:
    source, folder, log = tmp_path / "source", tmp_path / "cache", tmp_path / "log"
    source.mkdir()
    for i in range(5):
        (source / str(i)).write_bytes(bytes([i]) * 100)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [
        context.Process(target=_work, args=(folder, source, log, barrier, first + number))
        for number in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    downloads = log.read_text().split()
    if limited:
        assert len(downloads) > 5
        # Files in use at the end could not be removed. Now no file is in use.
        get(FileCache(folder, 350), 9)
        assert sum(map(len, files(folder))) == 300
    else:
        assert sorted(downloads) == ["0", "1", "2", "3", "4"]
    assert not list(folder.glob("*-part"))


def test_waiting_for_another_download_does_not_wait_for_its_reader(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()
    real = MemoryFileSystem.get_file

    def get_file(self: Any, remote: str, local: str, **options: Any) -> None:
        started.set()
        go.wait(10)
        real(self, remote, local, **options)

    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", get_file)
        threads = [
            threading.Thread(target=lambda: found.append(FileCache(tmp_path, 1000).opened(url(0), "v1", 100)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        started.wait(10)
        time.sleep(0.05)
        go.set()
        for thread in threads:
            thread.join(10)
    # All three threads hold the file at once.
    assert len(found) == 3
    for descriptor in found:
        os.close(descriptor)
