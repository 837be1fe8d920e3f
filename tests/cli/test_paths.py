"""Wrong paths on the command line are found before any work, with the path that may be meant."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from covpool.cli.main import main, named_alike
from covpool.cli.parser import WRITE_A_FILE
from tests.cli.test_arguments import RECIPES, log_of
from tests.cli.test_options import OPTIONS, POSITIONALS
from tests.data.trees import plant


def error_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message of a command that fails without a traceback."""
    verb, *rest = command.split()
    assert main([verb, *rest]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "Traceback" not in captured.err
    return captured.err.splitlines()[-1].removeprefix(f"covpool {verb}: ")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with images, a folder that looks like a model, and a text."""
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "birds", *(f"train/{bird}/1.jpg" for bird in ("jay", "wren")))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/covpool.json").write_text("{}", "utf-8")
    (tmp_path / "notes.txt").write_text("Saw a wren.\n", "utf-8")
    return tmp_path


def test_every_command_refuses_a_file_as_its_folder_of_results(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = [verb for verb in OPTIONS if "--out" in OPTIONS[verb] and f"covpool {verb}" not in WRITE_A_FILE]
    commands = [
        [verb, *("birds" for _ in POSITIONALS[verb]), "--out", out]
        for verb in verbs
        for out in ("notes.txt", "notes.txt/run")
    ]
    log = log_of(commands, place)
    assert "torch" not in log
    sentence = "--out must be a folder, and notes.txt is a file: use another --out"
    assert log == [line for verb in verbs for line in [f"covpool {verb}: {sentence}", "2"] * 2]
    for verb in RECIPES:
        assert error_of(f"{verb} birds --out notes.txt", capsys) == sentence


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "eval birds bundle",
            "bundle is a model: pass the model first, as in covpool eval bundle birds",
        ),
        (
            "forget notes.txt bundle",
            "bundle is a model: pass the model first, as in covpool forget bundle notes.txt",
        ),
        ("check birds --out birds", "birds: Is a directory: a folder is where a file should be; give a file"),
        (
            "fit birds --weights bundle",
            "bundle: Is a directory: a folder is where a file should be; give a file",
        ),
        ("merge bundle bundel", "bundel: No such file or directory: did you mean bundle?"),
        ("update bundel birds", "bundel: No such file or directory: did you mean bundle?"),
        ("fit birds/trian/jay", "birds/trian/jay: No such file or directory: did you mean train?"),
        ("fit s3:/birds/all", "s3:/birds/all: No such file or directory: did you mean s3://birds/all?"),
        ("fit birds.zip", "birds.zip is an archive: unpack it, and pass the folder"),
        (
            "fit https://example.org/birds.zip",
            "https://example.org/birds.zip is an archive: download it, unpack it, and pass the folder",
        ),
        (
            "forget bundle notes.txt",
            "notes.txt is not an image: pass an image, a folder of images, or a CSV whose first line is path",
        ),
    ],
)
def test_a_wrong_path(command: str, sentence: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile("birds.zip", "w") as archive:
        archive.write("notes.txt")
    assert error_of(command, capsys).removeprefix(f"{place}/") == sentence


def test_the_shortest_name_that_begins_alike_is_proposed(place: Path) -> None:
    for name in ("birds-old", "birds.csv"):
        (place / name).mkdir()
    assert named_alike("bird") == ": did you mean birds?"
    assert named_alike("nowhere/at/all") == ""
