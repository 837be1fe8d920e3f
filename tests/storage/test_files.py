"""Files are read within limits, and links never lead a write elsewhere."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from covpool.errors import StorageError, TooLargeError
from covpool.storage.files import (
    append_file,
    check_regular,
    create_file,
    digest,
    digest_file,
    mark_file,
    read_file,
    read_text,
    replace_file,
    update_file,
    write_file,
)
from covpool.storage.folders import LOCK, held, make_folder, rename_folder
from covpool.storage.manifest import Manifest, Part, check_part, part_of, read_part

READERS = (lambda path: read_file(path, 100), lambda path: check_regular(path, 100), digest_file)


@pytest.mark.parametrize("read", READERS)
def test_only_regular_files_are_read(read, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "endless").symlink_to(tmp_path / "endless")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "zeros", "socket"):
            with pytest.raises(OSError, match="not a regular file") as caught:
                read(tmp_path / name)
            assert caught.value.filename == str(tmp_path / name)
    for name in ("endless", "missing", "."):
        with pytest.raises(OSError):  # noqa: PT011  # each kind has its own class
            read(tmp_path / name)


def test_a_file_has_at_most_the_bytes_that_the_caller_states(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    assert read_file(tmp_path / "file", 100) == bytes(100)
    for read in (read_file, check_regular):
        with pytest.raises(TooLargeError, match=r"file has more than 99 bytes"):
            read(tmp_path / "file", 99)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs files of unknown size")
def test_files_of_unknown_size_have_a_limit_too() -> None:
    assert "heap" in read_text("/proc/self/maps")
    with pytest.raises(TooLargeError):
        read_file("/proc/self/maps", 100)


@pytest.mark.parametrize("flag", [os.O_NOFOLLOW, 0])  # Windows has no such flag
@pytest.mark.parametrize("target", ["precious", "missing"])
def test_links_are_refused_where_a_file_is_changed_in_place(
    target: str, flag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.storage.files._NOFOLLOW", flag)
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / LOCK).symlink_to(tmp_path / target)
    (tmp_path / "link").symlink_to(tmp_path / target)
    with (
        pytest.raises(StorageError, match="is a link, and covpool does not write through links"),
        held(tmp_path),
    ):
        pass
    for write in (lambda path: append_file(path, b"x"), update_file, mark_file):
        with pytest.raises(StorageError, match="link is a link"):
            write(tmp_path / "link")
    with pytest.raises((FileExistsError, StorageError)):
        create_file(tmp_path / "link")
    assert (tmp_path / "precious").read_text() == "years of work"
    assert not (tmp_path / "missing").exists()


def test_a_link_in_place_of_a_temporary_name_is_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / ".report.html.covpool-saving").symlink_to(tmp_path / "precious")
    (tmp_path / "report.html").symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "report.html", b"new")
    assert (tmp_path / "precious").read_text() == "years of work"
    assert (tmp_path / "report.html").read_bytes() == b"new"


def test_a_pipe_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(OSError, match="not a regular file"), held(tmp_path):
        pass


def test_appending_to_a_pipe_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    errors: list[int | None] = []

    def append() -> None:
        try:
            append_file(tmp_path / "log", b"a\n")
        except OSError as error:
            errors.append(error.errno)

    thread = threading.Thread(target=append, daemon=True)
    thread.start()
    thread.join(10)
    assert errors == [errno.ENXIO]


def test_folders_inside_an_output_folder_are_no_links(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "tensorboard").symlink_to(tmp_path / "other")
    with pytest.raises(StorageError, match="tensorboard is a link"):
        make_folder(tmp_path / "tensorboard")
    (tmp_path / "step").mkdir()
    rename_folder(tmp_path / "step", tmp_path / "tensorboard")
    assert (tmp_path / "other").is_dir()
    assert not (tmp_path / "tensorboard").is_symlink()


def test_the_log_grows(tmp_path: Path) -> None:
    append_file(tmp_path / "log", b"a\n")
    append_file(tmp_path / "log", b"b\n")
    assert (tmp_path / "log").read_bytes() == b"a\nb\n"


def test_digests_of_a_file_and_of_its_parts(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"0123456789")
    assert digest_file(tmp_path / "file") == digest(b"0123456789")
    assert digest_file(tmp_path / "file", 2, 5) == digest("234")


def test_a_manifest_finds_every_changed_byte(tmp_path: Path) -> None:
    part = part_of(b"content", rows=2)
    write_file(tmp_path / "rows", b"content")
    assert read_part(tmp_path, "rows", part) == b"content"
    check_part(tmp_path, "rows", part)
    data = Manifest({"rows": part}, {"key": [1, 2]}).written()
    assert Manifest.read(data).parts == {"rows": part}
    for damaged in (data[:-1], data + b" ", data.replace(b"{", b"{ ", 1), b"[]", b"\xff", b"[" * 10**5):
        with pytest.raises(StorageError, match="the manifest is damaged"):
            Manifest.read(damaged)
    for other in (b"conten", b"content ", b"Content"):
        (tmp_path / "rows").write_bytes(other)
        for check in (read_part, check_part):
            with pytest.raises(StorageError, match=r"rows is damaged|rows has more than"):
                check(tmp_path, "rows", part)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".hidden", "a/b", "a\\b", "", "C:x", "x\0"])
def test_a_manifest_names_plain_files_only(name: str) -> None:
    with pytest.raises(StorageError, match="not a plain file name"):
        Manifest.read(Manifest({name: part_of(b"")}).written())


@pytest.mark.parametrize("size", [-1, 1 << 62, 1.5, "7", True, None])
def test_a_manifest_has_the_sizes_of_its_files(size: int) -> None:
    with pytest.raises(StorageError, match="the manifest is damaged"):
        Manifest.read(Manifest({"rows": Part(size, "")}).written())


def test_a_file_of_the_kernel_that_would_block_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such files have no size, and look regular; /proc/kmsg is one, which a test must not read."""
    (tmp_path / "empty").write_bytes(b"")
    assert read_file(tmp_path / "empty", 100) == b""

    def blocks(*_: object) -> bytes:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "pread", blocks)
    with pytest.raises(StorageError, match="empty cannot be read: Resource temporarily unavailable"):
        read_file(tmp_path / "empty", 100)
