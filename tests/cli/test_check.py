"""``covpool check``: table, CSV, exit codes and safe interruption."""

from __future__ import annotations

import csv
import inspect
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from covpool.cli.images import CheckArguments
from covpool.cli.main import main
from covpool.data import SOURCES
from covpool.data import look as collection
from covpool.data.check import REMEDIES, check
from covpool.data.look import Look
from tests.data.pictures import RED, jpeg
from tests.data.trees import digests, plant, write


@pytest.fixture
def messy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with a truncated image, a duplicate in another split, and a comma in a file name."""
    plant(tmp_path / "set", *(f"{s}/{c}/{i}.jpg" for s in ("train", "test") for c in "ab" for i in (1, 2)))
    write(tmp_path / "set/train/a/x, y.jpg", jpeg(RED)[:-9])
    write(tmp_path / "set/test/b/3.jpg", (tmp_path / "set/train/b/1.jpg").read_bytes())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "set"


def test_options_are_those_of_the_library() -> None:
    parameters = inspect.signature(check).parameters
    example = CheckArguments("set")
    assert (example.layout, example.workers) == (parameters["layout"].default, parameters["workers"].default)
    assert set(get_args(get_type_hints(CheckArguments)["layout"])) == {"auto", *SOURCES}


def test_files_that_are_no_images_are_counted(messy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("notes.txt", "train/a/box.xml", "train/a/more.xml", "LICENSE"):
        (messy / name).write_text("text")
    assert main(["check", str(messy)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("ignored, since they are no images: 2 .xml, 1 ")


def test_as_a_person_runs_it(messy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digests(messy)
    assert main(["check", str(messy)]) == 1
    assert capsys.readouterr() == (
        f"{messy}: layout folder, 10 images (train 5, test 5), 2 classes\n"
        "\n"
        "problem    count  what to do\n"
        f"truncated      1  {REMEDIES['truncated']}\n"
        f"leak           1  {REMEDIES['leak']}\n"
        "\n"
        "runs/problems.csv lists each one. No file was changed.\n",
        "",
    )
    with open("runs/problems.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["path", "problem", "detail"],
            ["train/a/x, y.jpg", "truncated", "the end of the JPEG is missing"],
            ["test/b/3.jpg", "leak", "it has the bytes of train/b/1.jpg"],
        ]
    assert list(Path().rglob("*.*")) == [Path("runs/problems.csv")]
    assert digests(messy) == before


def test_no_problems_found(messy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (messy / "train/a/x, y.jpg").unlink()
    (messy / "test/b/3.jpg").unlink()
    assert main(["check", str(messy), "--out", "report.csv"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("2 classes\n\nNo problems found.\n")
    assert not err
    assert Path("report.csv").read_text() == "path,problem,detail\n"


def test_json(messy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(messy), "--json", "--workers", "2", "--layout", "folder"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "data": str(messy),
        "layout": "folder",
        "images": {"train": 5, "test": 5},
        "classes": 2,
        "problems": {"truncated": 1, "leak": 1},
        "ignored": {},
        "output": "runs/problems.csv",
    }


def test_an_older_report_is_replaced_and_nothing_else(
    messy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["check", str(messy)]) == 1
    write(Path("labels.csv"), b"path,label\n")
    capsys.readouterr()
    assert main(["check", str(messy), "--out", "labels.csv"]) == 2
    sentence = "labels.csv exists and is not a report of covpool check: use another --out"
    assert capsys.readouterr() == ("", f"covpool check: {sentence}\n")
    assert Path("labels.csv").read_bytes() == b"path,label\n"


@pytest.mark.parametrize("inside", ["", "train/a"])
def test_no_report_goes_into_the_data_unasked(
    inside: str, messy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(messy / inside)
    before = digests(messy)
    assert main(["check", os.path.relpath(messy)]) == 2
    sentence = "runs/problems.csv would be inside the data: pass --out"
    assert capsys.readouterr() == ("", f"covpool check: {sentence}\n")
    assert digests(messy) == before
    assert main(["check", os.path.relpath(messy), "--out", "problems.csv"]) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "none: No such file or directory"),
        (
            [".", "--out", "none/problems.csv"],
            "none is not a folder: give --out a file in an existing folder",
        ),
        (
            ["SET", "--layout", "zip"],
            "--layout takes auto, csv, shards, cub, aircraft, cars, parquet or folder; got zip",
        ),
        (["SET", "--workers", "0"], "--workers must be at least 1; got 0"),
    ],
)
def test_mistakes(
    arguments: list[str], sentence: str, messy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *(str(messy) if word == "SET" else word for word in arguments)]) == 2
    assert capsys.readouterr() == ("", f"covpool check: {sentence}\n")
    assert not os.listdir()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems want UTF-8")
def test_names_that_are_no_text(messy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsencode(messy) + b"/train/a/\xff.jpg"
    Path(os.fsdecode(name)).write_bytes(b"")
    assert main(["check", str(messy)]) == 1
    assert b"train/a/\xff.jpg,unreadable,the file is empty\n" in Path("runs/problems.csv").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_ctrl_c(messy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    looked = []

    def slowly(images: Any, i: int, lock: object) -> Look:
        looked.append(i)
        if len(looked) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)
        return Look("", "")

    monkeypatch.setattr(collection, "look", slowly)
    monkeypatch.setattr(collection, "IMAGES_AT_ONCE", 1)
    threads = set(threading.enumerate())  # object storage used by another test may keep one
    # A shell starts background jobs with Ctrl-C ignored. This test may run in such a job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["check", str(messy), "--workers", "1"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "covpool check: stopped\n")
    assert len(looked) < 8
    assert set(threading.enumerate()) <= threads
    assert not os.listdir()
