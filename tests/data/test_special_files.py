"""Pipes and devices among the files: reading them would never end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covpool.data.check import check
from covpool.data.shards.reader import open_shards
from covpool.data.sources import open_images, open_splits, open_unlabeled
from covpool.storage.files import append_file, open_regular
from tests.data.pictures import jpeg

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes in folders")


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """End a test that hangs."""

    def stop(*arguments: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


SPECIAL = ("pipe", "link to a pipe", "link to /dev/zero", "socket")


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        pipe = path.with_name(f".{path.name}")
        os.mkfifo(pipe)
        path.symlink_to(pipe)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            os.chdir(path.parent)  # the path of a socket is at most a hundred bytes long
            one.bind(path.name)
    else:
        path.symlink_to("/dev/zero")


@pytest.fixture(params=SPECIAL)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def test_regular_files_alone_are_opened(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / "a.jpg")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes(b"good")
    (tmp_path / "link.jpg").symlink_to("b.jpg")
    with open_regular(tmp_path / "link.jpg") as file:
        assert file.read() == b"good"
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_a_pipe_that_replaces_a_file_after_the_check_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    status = os.stat(tmp_path / "file")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda path: status)
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / "pipe")


def test_a_pipe_without_a_reader_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="No such device or address"):
        append_file(tmp_path / "log", b"x")


def test_among_images(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "set" / "wren"
    folder.mkdir(parents=True)
    for name in ("1.jpg", "2.jpg"):
        (folder / name).write_bytes(jpeg((200, 100, 50)))
    (folder.parent / "list.csv").write_text("path,label\nwren/1.jpg,wren\nwren/2.jpg,wren\nwren/3.jpg,wren\n")
    put(kind, folder / "3.jpg")
    put(kind, folder / "notes")  # check opens files without an extension
    report = check(tmp_path / "set", "folder", workers=1)
    assert report.counts.get("unreadable", 0) == kind.startswith("link")  # other kinds are not listed
    sentence = "it is a link out of" if kind == "link to /dev/zero" else "not a regular file"
    for images in (open_unlabeled(tmp_path / "set" / "list.csv"), open_images(tmp_path / "set" / "list.csv")):
        with pytest.raises(OSError, match=sentence):
            images.read(2)


def test_instead_of_a_table_a_tar_or_an_index(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / "list.csv")
    for opened in (open_unlabeled, open_splits):
        with pytest.raises(OSError, match="not a regular file"):
            opened(tmp_path / "list.csv")
    (tmp_path / "tars").mkdir()
    put(kind, tmp_path / "tars" / "0.tar")
    with pytest.raises((OSError, ValueError), match=r"not a regular file|has no images|no tars"):
        open_unlabeled(tmp_path / "tars")
    (tmp_path / "tars" / "index.json").unlink(missing_ok=True)
    put(kind, tmp_path / "tars" / "index.json")
    with pytest.raises((OSError, ValueError), match=r"not a regular file"):
        open_shards(tmp_path / "tars")
    put(kind, tmp_path / "some.parquet")
    with pytest.raises(ValueError, match="not a regular file"):
        open_unlabeled(tmp_path / "some.parquet")
