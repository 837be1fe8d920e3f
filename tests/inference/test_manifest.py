"""Finished files are not trusted: they are compared with the manifest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from covpool.inference import Files, Predict, Running, infer
from covpool.inference.place import MANIFEST, TAIL, Disk, OutputManifest, table_part
from tests.inference.small import pictures, rows_of, write_folder

RUNNING = Running(batch_size=16, workers=0)
VERIFY = replace(RUNNING, verify=True)


@pytest.fixture(scope="module", params=["parquet", "csv"])
def done(tmp_path_factory: pytest.TempPathFactory, bundle: Path, request: pytest.FixtureRequest) -> Path:
    """The folders of images and rows of a finished job."""
    folder = tmp_path_factory.mktemp("done")
    files = Files(request.param, rows_per_file=10)
    infer(bundle, write_folder(folder / "data", pictures(40)), folder / "out", Predict(), files, RUNNING)
    return folder


def damage(out: Path) -> None:
    """Truncate one file, empty one, replace one by another, and overwrite the end of one."""
    files = sorted(out.glob("0*"))
    os.truncate(files[0], files[0].stat().st_size // 2)
    files[1].write_bytes(b"")
    shutil.copy(files[3], files[2])
    files[3].write_bytes(files[3].read_bytes()[:-20] + bytes(20))


def without_manifest(out: Path) -> None:
    (out / MANIFEST).unlink()


def damaged_manifest(out: Path) -> None:
    (out / MANIFEST).write_text('{"parts": [{"file": 1')


def check(bundle: Path, done: Path, out: Path, spoil: Callable[[Path], None], running: Running) -> int:
    """Return how many files are computed again; all rows are there afterwards."""
    shutil.copytree(done / "out", out)
    spoil(out)
    files = Files(rows_per_file=10)
    again = infer(bundle, done / "data", out, Predict(), files, running).new_files
    assert rows_of(out) == rows_of(done / "out")
    assert infer(bundle, done / "data", out, Predict(), files, VERIFY).new_files == 0
    return again


@pytest.mark.parametrize("spoil", [lambda out: None, without_manifest, damaged_manifest])
def test_damaged_files_are_computed_again(
    tmp_path: Path,
    bundle: Path,
    done: Path,
    spoil: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def both(out: Path) -> None:
        damage(out)
        spoil(out)

    assert check(bundle, done, tmp_path / "out", both, RUNNING) == 4
    for number in range(4):
        assert re.search(rf"000000{number}\.\w+ was truncated or changed since it was written", caplog.text)


def test_every_byte_is_compared_on_request(tmp_path: Path, bundle: Path, done: Path) -> None:
    (file,) = (done / "out").glob("0000001.*")

    def spoil(out: Path) -> None:
        data = bytearray((out / file.name).read_bytes())
        data[8] ^= 1
        (out / file.name).write_bytes(data)

    assert check(bundle, done, tmp_path / "out", spoil, VERIFY) == 1


def test_last_bytes_are_compared_without_the_request(tmp_path: Path) -> None:
    data, manifest = bytes(2 * TAIL), OutputManifest(Disk(tmp_path))
    manifest.add({"rows.csv": table_part(data, 0)})
    (tmp_path / "rows.csv").write_bytes(b"1" + data[1:])
    assert manifest.is_valid("rows.csv", len(data), thoroughly=False)
    assert not manifest.is_valid("rows.csv", len(data), thoroughly=True)


def test_valid_files_without_an_entry_are_kept(tmp_path: Path, bundle: Path, done: Path) -> None:
    """A kill leaves such files."""
    assert check(bundle, done, tmp_path / "out", without_manifest, RUNNING) == 0
    listed = json.loads((tmp_path / "out" / MANIFEST).read_bytes())["parts"]
    assert listed == json.loads((done / "out" / MANIFEST).read_bytes())["parts"]


def test_truncated_objects_are_computed_again(
    bundle: Path, done: Path, memory: fsspec.AbstractFileSystem
) -> None:
    files = Files("parquet", rows_per_file=10)
    infer(bundle, done / "data", "memory://rows", Predict(), files, RUNNING)
    whole = memory.cat_file("/rows/0000001.parquet")
    memory.pipe_file("/rows/0000001.parquet", whole[:-100])
    assert infer(bundle, done / "data", "memory://rows", Predict(), files, RUNNING).new_files == 1
    assert memory.cat_file("/rows/0000001.parquet") == whole
