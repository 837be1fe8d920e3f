"""The job that a folder of rows belongs to."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from covpool.inference import Done, Embed, Files, Predict, Running, infer
from covpool.inference.bulk import report_text
from covpool.inference.place import Disk
from covpool.inference.work import Predictor
from covpool.models import create_model, save_model
from covpool.models.bundle import read_card
from tests.inference.small import CLASSES, hidden, pictures, rows_of, write_folder

RUNNING = Running(batch_size=16, workers=0)
FILES = Files("parquet", rows_per_file=10)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    """The folders of images and rows of a finished job."""
    folder = tmp_path_factory.mktemp("done")
    infer(bundle, write_folder(folder / "data", pictures(24)), folder / "out", Predict(), FILES, RUNNING)
    return folder


@pytest.fixture
def data(tmp_path: Path, done: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(done / "data", tmp_path / "data"))


@pytest.fixture
def out(tmp_path: Path, done: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(done / "out", tmp_path / "out"))


def test_a_job_that_is_done_is_not_done_again(out: Path, bundle: Path, data: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name[0] != "."}
    done = infer(bundle, data, out, Predict(), FILES, RUNNING)
    assert (done.images, done.files, done.new_images, done.new_files) == (24, 3, 0, 0)
    assert report_text(done).endswith("24 rows in 3 files, all of them there already")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name[0] != "."} == before


def test_what_is_missing_is_made(out: Path, bundle: Path, data: Path) -> None:
    rows = rows_of(out)
    (out / "0000001.parquet").unlink()
    done = infer(bundle, data, out, Predict(), FILES, RUNNING)
    assert (done.new_images, done.new_files) == (10, 1)
    assert rows_of(out) == rows


def test_batches_and_workers_may_change(out: Path, bundle: Path, data: Path) -> None:
    (out / "0000001.parquet").unlink()
    assert infer(bundle, data, out, Predict(), FILES, Running(batch_size=3, workers=1)).new_files == 1


@pytest.mark.parametrize(
    ("task", "files", "sentence"),
    [
        (Predict(top=3), FILES, r"\(top was 5, is 3\)"),
        (Predict(flip=True), FILES, r"\(flip was False, is True\)"),
        (Predict(precision="bfloat16"), FILES, "precision was float32, is bfloat16"),
        (Embed(), FILES, "task was predict, is embed"),
        (
            Predict(),
            Files("parquet", rows_per_file=12),
            r"\(units was 3, is 2, rows_per_file was 10, is 12\)",
        ),
        (Predict(), Files("csv", 10), "format was parquet, is csv"),
    ],
)
def test_other_settings_are_refused(
    out: Path, bundle: Path, data: Path, task: Any, files: Files, sentence: str
) -> None:
    rows = rows_of(out)
    with pytest.raises(ValueError, match=sentence):
        infer(bundle, data, out, task, files, RUNNING)
    assert rows_of(out) == rows


def test_other_images_are_refused(out: Path, bundle: Path, data: Path) -> None:
    (data / "00001.jpg").rename(data / "renamed.jpg")
    with pytest.raises(ValueError, match=r"\(images of other names, sizes or dates\)"):
        infer(bundle, data, out, Predict(), FILES, RUNNING)


def test_images_replaced_by_others_of_the_same_name_are_refused(out: Path, bundle: Path, data: Path) -> None:
    size = (data / "00001.jpg").stat().st_size
    (data / "00001.jpg").write_bytes(bytes(size))
    with pytest.raises(ValueError, match="other names, sizes or dates"):
        infer(bundle, data, out, Predict(), FILES, RUNNING)


def test_a_job_without_rows_may_still_change(tmp_path: Path, bundle: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="project"):
        infer(bundle, data, tmp_path / "out", Embed(project=5000), FILES, RUNNING)
    assert (tmp_path / "out" / "_job.json").exists()
    assert infer(bundle, data, tmp_path / "out", Embed(project=16), FILES, RUNNING).new_files == 3
    with pytest.raises(ValueError, match="project was 16, is 8"):
        infer(bundle, data, tmp_path / "out", Embed(project=8), FILES, RUNNING)


def test_a_bundle_that_was_replaced_meanwhile_is_refused(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(ValueError, match="not the bundle any more"):
        Predictor(bundle, Predict(), "cpu", sha256="0" * 64)
    Predictor(bundle, Predict(), "cpu", sha256=read_card(bundle).sha256)


def test_another_bundle_is_refused(tmp_path: Path, out: Path, data: Path) -> None:
    torch.manual_seed(1)  # the bundle has seed 0
    other = save_model(
        create_model("test_resnet", dim=8, num_classes=6, image_size=64), tmp_path / "b", classes=CLASSES
    )
    with pytest.raises(ValueError, match=r"\(another bundle\)"):
        infer(other, data, out, Predict(), FILES, RUNNING)


def test_rows_do_not_go_among_the_images(bundle: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    for images, out in ((".", "predictions"), (data.as_uri(), data / "predictions")):
        with pytest.raises(ValueError, match=r"rows would go into the images themselves, .*: give --out"):
            infer(bundle, images, out, Predict(), FILES, RUNNING)
    assert not (data / "predictions").exists()
    assert infer(bundle, ".", "memory://among", Predict(), FILES, RUNNING).new_files == 3
    with pytest.raises(ValueError, match="rows would go into the images themselves"):
        infer(bundle, "memory://among", "memory://among/rows", Predict(), FILES, RUNNING)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("thesis.txt", "", r"holds other files, such as 'thesis\.txt'"),
        ("_job.json", '{"name": "mine"}', "that covpool did not write"),
        ("_job.json", "{", "that covpool did not write"),
    ],
)
def test_the_folder_of_something_else(
    tmp_path: Path, bundle: Path, data: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        infer(bundle, data, tmp_path / "out", Predict(), FILES, RUNNING)
    assert (tmp_path / "out" / name).read_text() == content


def test_what_a_kill_left_is_removed(out: Path, bundle: Path, data: Path) -> None:
    (out / "0000002.parquet").unlink()
    (out / ".0000002.parquet.12345678.covpool-saving").write_bytes(b"half")
    infer(bundle, data, out, Predict(), FILES, RUNNING)
    assert hidden(out) == []
    assert len(rows_of(out)) == 24


def _hold(out: Path, is_held: Any) -> None:
    with Disk(out).held():
        is_held.set()
        time.sleep(600)


def test_two_at_a_time_are_refused(out: Path, bundle: Path, data: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    other = context.Process(target=_hold, args=(out, is_held))
    other.start()
    assert is_held.wait(60)
    with pytest.raises(ValueError, match="another process is writing"):
        infer(bundle, data, out, Predict(), FILES, RUNNING)
    other.kill()
    other.join()
    assert infer(bundle, data, out, Predict(), FILES, RUNNING).new_files == 0


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_file(tmp_path: Path, bundle: Path, data: Path) -> None:
    """A limit on the size of files makes writes fail, as a full disk does."""
    command = [sys.executable, "-m", "covpool", "embed", bundle, data, "--workers", "0"]
    command += ["--rows-per-file", "10", "--out", tmp_path / "out"]
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    message = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, message.startswith(f"covpool embed: {tmp_path / 'out'}")) == (2, True)
    assert message.endswith(": File too large")
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [".covpool-lock", "_job.json"]
    assert infer(bundle, data, tmp_path / "out", Embed(), FILES, RUNNING).new_files == 3


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    place = Disk(tmp_path)
    place.write("a", b"old")
    (tmp_path / "b").mkdir()
    with pytest.raises(OSError, match="b"):
        place.write("b", b"new")  # a folder has this name
    assert place.read("a") == b"old"
    assert hidden(tmp_path) == []


def test_the_job_says_what_it_is(out: Path) -> None:
    job = json.loads((out / "_job.json").read_bytes())
    assert (job["format"], job["task"], job["images"], job["units"]) == ("covpool bulk", "predict", 24, 3)
    assert job["options"] == {"top": 5, "flip": False, "precision": "float32"}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Predict(top=0), "top"),
        (lambda: Predict(precision="half"), "precision"),  # type: ignore[arg-type]
        (lambda: Embed(dtype="int8"), "dtype"),  # type: ignore[arg-type]
        (lambda: Embed(project=0), "project"),
        (lambda: Files("xml"), "format"),  # type: ignore[arg-type]
        (lambda: Files(rows_per_file=0), "rows_per_file"),
        (lambda: Running(batch_size=0), "batch_size"),
        (lambda: Running(workers=-1), "workers"),
        (lambda: Running(engine="spark"), "engine"),  # type: ignore[arg-type]
        (lambda: Running(device="tpu"), "device"),
    ],
)
def test_options_that_make_no_sense(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_what_a_person_reads() -> None:
    done = Done("rows", 2000, 2, 1000, 1, 3, 10.0)
    assert report_text(done) == (
        "rows: 2,000 rows in 2 files, 1,000 rows of them new, in 10 s (100 images per second)\n"
        "unreadable images: 3 of the new ones; see the column error"
    )
