"""``covpool shard``: a folder into shards, and an index for tars that are there."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from covpool.cli.main import main
from covpool.data.shards.reader import open_shards
from covpool.data.sources import open_splits
from tests.data.memory_images import memory_images


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three classes in train and val."""
    images = memory_images(30)
    for split, numbers in (("train", range(30)), ("val", range(0, 30, 5))):
        for i in numbers:
            path = tmp_path / "birds" / split / images.names[i]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(images.files[i])
    return tmp_path / "birds"


def test_a_folder_becomes_shards(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = data.parent / "shards"
    assert main(["shard", str(data), "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    assert not err
    train, val = out.splitlines()
    assert train.startswith(f"{output / 'train'}: 30 images of 3 classes in 1 shard, 0.")
    assert val.startswith(f"{output / 'val'}: 6 images of 3 classes in 1 shard, 0.")
    sets, files = open_splits(output), open_splits(data)
    assert sets.keys() == files.keys() == {"train", "val"}
    for split in sets:
        assert sorted(sets[split].read(i) for i in range(len(sets[split]))) == sorted(
            files[split].read(i) for i in range(len(files[split]))
        )
        assert sets[split].classes == ("a", "b", "c")


def test_every_option_arrives(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = []
    for name, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        output = data.parent / name
        options = ["--seed", seed, "--megabytes", "1", "--layout", "folder", "--json"]
        assert main(["shard", str(data), "--output", str(output), *options]) == 0
        folders = json.loads(capsys.readouterr().out)["folders"]
        assert [folder["images"] for folder in folders] == [30, 6]
        contents.append((output / "train" / "00000.tar").read_bytes())
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("arguments", [["--index", "{}"], ["{}", "--index"], ["{}", "--index", "true"]])
def test_an_index_for_tars(data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    output = data.parent / "shards"
    assert main(["shard", str(data), "--output", str(output)]) == 0
    before = {path: path.read_bytes() for path in output.rglob("*.*")}
    for path in output.rglob("*.json"):
        path.unlink()
    names = data.parent / "names.txt"
    names.write_text("jay\nwren\nsnow bunting\n", "utf-8")
    assert main(["shard", *(word.format(output) for word in arguments)]) == 0
    assert {path: path.read_bytes() for path in output.rglob("*.*")} == before
    (output / "train" / "extra.tar").write_bytes(b"no tar")
    capsys.readouterr()
    assert main(["shard", "--index", str(output), "--classes", str(names)]) == 2
    assert capsys.readouterr().err.startswith("covpool shard: extra.tar is cut short, damaged or no tar")
    (output / "train" / "extra.tar").unlink()
    assert main(["shard", "--index", str(output), "--classes", str(names)]) == 0
    assert open_shards(output / "val").classes == ("jay", "wren", "snow bunting")


def test_what_is_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(memory_images(1).files[0])
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "a.png")
    assert main(["shard", "--index", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "left out: 1 samples without an image, or without a label in .cls"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{}"], "--output is missing: the folder for the shards, or --index if there are tars already"),
        (["{}", "--index", "--output", "x"], "--index writes beside the tars: give no --output"),
        (["{}", "--output", "x", "--classes", "y"], "--classes is for --index: images bring"),
        (["{}", "--output", "x", "--megabytes", "0"], "--megabytes must be at least 1; got 0"),
        (["{}", "--output", "{}"], "{} exists: shards are written into a new folder"),
        (["{}", "--output", "s3://bucket/x"], "s3://bucket/x is no folder on a disk: use one"),
        (["s3://bucket/x", "--index"], "s3://bucket/x is no folder on a disk: use one"),
        (["{}/none", "--output", "x"], "{}/none: No such file or directory"),
        (["{}", "--index"], "{} has no tars"),
        (["{}", "--index", "--classes", "{}/none"], "{}/none: No such file or directory"),
    ],
)
def test_mistakes(
    data: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(data.parent.rglob("*"))
    assert main(["shard", *(word.format(data) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"covpool shard: {sentence.format(data)}")
    assert err.count("\n") == 1
    assert sorted(data.parent.rglob("*")) == before
