"""Errors that cost an image its row, and errors that end the job."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from covpool.cli.main import main
from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing
from covpool.errors import BadImageError, ShardError, UnreachableError
from covpool.inference import Predict, Running, infer
from covpool.inference.work import Decoder
from covpool.storage.remote import Requests, limited
from tests.inference.small import picture, write_folder
from tests.inference.test_inputs import BYTES, a_parquet, foreign_tars, indexed


def test_a_tar_that_changed_fails_as_a_whole(tmp_path: Path, bundle: Path) -> None:
    folder = indexed(tmp_path)
    images = open_unlabeled(folder)
    (folder / "00000.tar.json").write_text("{}")
    with pytest.raises(ShardError, match="is not the file that"):
        images.read(0)
    with pytest.raises(ValueError, match="is not the file that"):
        infer(bundle, folder, tmp_path / "out", Predict(), running=Running(workers=1))


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_parquet_file_of_which_part_is_spoiled_fails_in_a_sentence(
    tmp_path: Path, bundle: Path, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = a_parquet(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[:4] + b"\xff" * 400 + data[404:])  # damages a column, not the list of columns
    words = ["--out", str(tmp_path / "out"), "--device", "cpu", "--workers", workers]
    assert main(["predict", str(bundle), str(file), *words]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"covpool predict: {file} cannot be read: ")


def test_a_tar_that_is_gone_fails_in_a_sentence(tmp_path: Path) -> None:
    tars = foreign_tars(tmp_path)
    images = open_unlabeled(tars)
    (tars / "part0.tar").unlink()
    with pytest.raises(ShardError, match=r"^the input cannot be read any more: .*part0.tar: No such file"):
        Decoder(Preprocessing(64)).batch(images, range(3))


@pytest.mark.parametrize("left", ["an empty folder", "nothing"])
def test_a_disk_that_was_taken_off_costs_no_rows(tmp_path: Path, left: str) -> None:
    """A file that was deleted, or that never existed, costs only its own row."""
    write_folder(tmp_path / "disk", {"a.jpg": picture(0), "b.jpg": picture(1)})
    (tmp_path / "list.csv").write_text("path\ndisk/a.jpg\nother/never.jpg\n")
    images = open_unlabeled(tmp_path / "list.csv")
    (tmp_path / "disk" / "a.jpg").unlink()
    with pytest.raises(FileNotFoundError):
        images.read(0)
    (tmp_path / "disk" / "b.jpg").unlink()
    if left == "nothing":
        (tmp_path / "disk").rmdir()
    with pytest.raises(ShardError, match=r"the input cannot be read any more: .*disk/a\.jpg: No such file"):
        images.read(0)
    with pytest.raises(FileNotFoundError):
        images.read(1)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_tar_that_goes_while_it_is_read_costs_no_rows(tmp_path: Path, damage: str) -> None:
    tars = foreign_tars(tmp_path)
    images = open_unlabeled(tars)
    assert images.read(0) == BYTES[0]
    if damage == "gone":
        (tars / "part0.tar").unlink()
    else:
        os.truncate(tars / "part0.tar", 2000)
    with pytest.raises(ShardError, match=r"^the input cannot be read any more: .*part0\.tar"):
        images.read(5)


def test_too_many_open_files_are_no_fault_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_unlabeled(write_folder(tmp_path, {"a.jpg": picture(0)}))

    def refuse(path: str) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", path)

    monkeypatch.setattr("covpool.storage.address.read_image", refuse)
    with pytest.raises(ShardError, match=r"the input cannot be read any more: .*Too many open files"):
        images.read(0)


class Refusing(MemoryFileSystem):
    """Object storage that denies access to one object, or to all objects."""

    protocol = "refusing"
    all_of_them = False

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return MemoryFileSystem._strip_protocol(path.removeprefix("refusing://"))

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        if self.all_of_them or path.endswith("secret.jpg"):
            raise PermissionError("Access Denied")
        if path.endswith("gone.jpg"):
            error = RuntimeError("410, message='Gone'")
            error.status = 410  # type: ignore[attr-defined]  # as errors of aiohttp have
            raise error
        return super().cat_file(path, *args, **kwargs)  # type: ignore[no-any-return]


def test_an_object_that_is_refused_costs_its_row_and_a_store_that_is_the_job(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    monkeypatch.setattr("covpool.storage.address._failed", 0)
    for name in ("gone.jpg", "good.jpg", "secret.jpg"):
        memory.pipe_file(f"/bucket/{name}", picture(0))
    with limited(Requests(max_bad=2)):
        images = open_unlabeled("refusing://bucket")
    with pytest.raises(OSError, match="the server answers 410"):
        images.read(0)
    assert images.read(1) == picture(0)
    with pytest.raises(UnreachableError, match="the store does not give it: Access Denied"):
        images.read(2)
    monkeypatch.setattr(Refusing, "all_of_them", True)
    with pytest.raises(UnreachableError):
        images.read(1)
    with pytest.raises(ShardError, match="3 URLs in sequence failed"):
        images.read(1)


def test_a_name_that_no_file_can_have_costs_its_row(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"path\na\0b.jpg\n")
    images = open_unlabeled(tmp_path / "list.csv")
    assert images.stamp()
    with pytest.raises(BadImageError, match="null byte"):
        images.read(0)
