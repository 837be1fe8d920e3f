"""Replacing a file or folder leaves the old or the new one complete, even if the process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import covpool
from covpool.storage.files import replace_file, write_file
from covpool.storage.folders import replace_folder
from tests.storage import dying

OLD, NEW = "old" * 10_000, "new" * 20_000


def run(what: str, how: str, number: int, path: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-S",
        dying.__file__,
        what,
        how,
        str(number),
        str(path),
        NEW,
    ]
    # A process starts faster without site-packages (-S); PYTHONPATH is then the only path to covpool.
    environment = {**os.environ, "PYTHONPATH": str(Path(covpool.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("what", ["file", "folder"])
def test_death_before_any_call_of_the_system_loses_nothing(what: str, tmp_path: Path) -> None:
    found = []
    for number in range(1, 100):
        parent = tmp_path / str(number)
        parent.mkdir()
        path = parent / "it"
        dying.replace(what, str(path), OLD)
        ended = run(what, "kill", number, path)
        found.append(dying.read(what, str(path)))
        # The next replacement succeeds, and removes the files that the killed process left.
        dying.replace(what, str(path), "next")
        assert dying.read(what, str(path)) == "next"
        assert names(parent) == ["it"]
        if ended.stdout == "unharmed\n":
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert 4 < number < 99
    # Early kills leave the old content, later ones the new content, and both occur.
    assert found == sorted(found, reverse=True)
    assert {found[0], found[-1]} == {OLD, NEW}


@pytest.mark.parametrize("how", ["fail", pytest.param("interrupt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_failure_of_any_call_of_the_system_loses_nothing(what: str, how: str, tmp_path: Path) -> None:
    for number in range(1, 100):
        parent = tmp_path / str(number)
        parent.mkdir()
        dying.replace(what, str(parent / "it"), OLD)
        ended = run(what, how, number, parent / "it")
        assert (parent / "it").exists(), "it was not put back"
        assert dying.read(what, str(parent / "it")) in ((OLD, NEW) if ended.returncode else (NEW,))
        dying.replace(what, str(parent / "it"), "next")
        assert names(parent) == ["it"]
        if ended.stdout == "unharmed\n":
            break
        assert not ended.returncode or "arranged" in ended.stderr
    assert 4 < number < 99


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the files' names")
def test_everything_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def watched_rename(before: Path, after: Path) -> None:
        calls.append(("rename", after.name))
        rename(before, after)

    dying.replace("folder", str(tmp_path / "it"), OLD)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    dying.replace("folder", str(tmp_path / "it"), NEW)
    saving = calls[2][1]
    assert calls == [
        ("fsync", "first"),
        ("fsync", "second"),
        ("fsync", saving),
        ("rename", ".it.covpool-previous"),
        ("rename", "it"),
        ("fsync", tmp_path.name),
    ]
    assert saving.startswith(".it.covpool-saving-")


def test_what_a_kill_left_does_not_hide_a_missing_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        leftover = tmp_path / ".it.covpool-saving-1" / name
        leftover.parent.mkdir(exist_ok=True)
        leftover.write_text(NEW)
    with pytest.raises(FileNotFoundError):
        dying.read("folder", str(tmp_path / "it"))


def test_exception_leaves_the_old_folder(tmp_path: Path) -> None:
    dying.replace("folder", str(tmp_path / "it"), OLD)
    with pytest.raises(FileExistsError), replace_folder(tmp_path / "it") as new:
        [write_file(new / "first", b"half") for _ in range(2)]
    assert dying.read("folder", str(tmp_path / "it")) == OLD
    assert names(tmp_path) == ["it"]


def test_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    write_file(tmp_path / "it", b"old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "it", b"new")
    assert (tmp_path / "it").read_bytes() == b"old"


def test_work_of_the_living_is_not_cleared_away(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "it") as first:
        dying.replace("folder", str(tmp_path / "it"), OLD)
        replace_file(tmp_path / "log", b"no lock is held meanwhile")
        for name in ("first", "second"):
            write_file(first / name, NEW.encode())
    assert dying.read("folder", str(tmp_path / "it")) == NEW
    assert names(tmp_path) == ["it", "log"]


def test_folders_of_similar_names_are_not_cleared_away(tmp_path: Path) -> None:
    for name in (".it", "it.covpool-saving-1", ".it2.covpool-saving-1", ".it.covpool-saving"):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    dying.replace("folder", str(tmp_path / "it"), NEW)
    assert names(tmp_path) == sorted([*before, "it"])


def test_private_folder_stays_private(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir(mode=0o700)
    dying.replace("folder", str(tmp_path / "it"), NEW)
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_is_replaced_and_its_target_stays(what: str, tmp_path: Path) -> None:
    dying.replace(what, str(tmp_path / "real"), OLD)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "it").symlink_to(tmp_path / "real")
    dying.replace(what, str(tmp_path / "links" / "it"), NEW)
    assert not (tmp_path / "links" / "it").is_symlink()
    assert dying.read(what, str(tmp_path / "links" / "it")) == NEW
    assert dying.read(what, str(tmp_path / "real")) == OLD
    assert names(tmp_path / "links") == ["it"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_the_folder_of_a_file_may_be_a_link(what: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    dying.replace(what, str(tmp_path / "runs" / "it"), NEW)
    assert dying.read(what, str(tmp_path / "disk" / "it")) == NEW


@pytest.mark.parametrize("what", ["file", "folder"])
def test_writers_and_readers_at_once_do_not_disturb_each_other(what: str, tmp_path: Path) -> None:
    path, ends, errors = str(tmp_path / "it"), time.monotonic() + 1, []
    dying.replace(what, path, "0")

    def write(text: str) -> None:
        try:
            while time.monotonic() < ends:
                dying.replace(what, path, text)
        except BaseException as error:
            errors.append(error)

    # Locks belong to open files, not to processes, so threads can stand in for processes.
    writers = [threading.Thread(target=write, args=(text,)) for text in ("1", "2")]
    for writer in writers:
        writer.start()
    seen = []
    while time.monotonic() < ends:
        seen.append(dying.read(what, path))
    for writer in writers:
        writer.join()
    assert not errors
    assert {"1", "2"} <= set(seen) <= {"0", "1", "2"}
    assert names(tmp_path) == ["it"]
