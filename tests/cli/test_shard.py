"""``covpool shard``: convert a folder into shards, and index existing tars."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from covpool.cli.main import main
from covpool.data.image_set import ImageSet
from covpool.data.shards.index import ShardIndex
from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import write_shards
from covpool.data.sources import open_splits
from covpool.training.recipe import DataOptions
from covpool.training.splits import open_data, split_off
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
    assert main(["shard", str(data), "--out", str(output)]) == 0
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


@pytest.mark.parametrize("given", ["birds", "birds/", ".."])
def test_the_default_folder_has_the_name_of_the_data(
    given: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data / "train" if given == ".." else data.parent)
    assert main(["shard", given]) == 0
    assert open_splits("birds-shards").keys() == {"train", "val"}


def test_every_option_arrives(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = []
    for name, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        output = data.parent / name
        options = ["--seed", seed, "--megabytes", "1", "--layout", "folder", "--json"]
        assert main(["shard", str(data), "--out", str(output), *options]) == 0
        folders = json.loads(capsys.readouterr().out)["folders"]
        assert [folder["images"] for folder in folders] == [30, 6]
        contents.append((output / "train" / "00000.tar").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_a_val_where_there_is_none(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = data.parent / "shards"
    options = ["--seed", "3", "--val-fraction", "0.2"]
    assert main(["shard", str(data / "train"), "--out", str(output), *options]) == 0
    assert [line.partition(" images")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{output / 'train'}: 24",
        f"{output / 'val'}: 6",
    ]
    sets, images = open_splits(output), open_splits(data / "train")["train"]
    expected = zip(("train", "val"), split_off(images, 0.2, seed=3), strict=True)
    for split, part in expected:
        found = sets[split]
        names = {found.name(i): found.label(i) for i in range(len(found))}
        assert names == {part.name(i): int(part.labels[i]) for i in range(len(part))}
    assert np.bincount(np.asarray(sets["val"].labels)).tolist() == [2, 2, 2]


def test_a_val_that_is_there_stays(data: Path) -> None:
    output = data.parent / "shards"
    assert main(["shard", str(data), "--out", str(output), "--val-fraction", "0.5"]) == 0
    assert {split: len(images) for split, images in open_splits(output).items()} == {"train": 30, "val": 6}


def test_shards_with_a_val_can_be_trained_on(data: Path) -> None:
    output = data.parent / "shards"
    assert main(["shard", str(data / "train"), "--out", str(output)]) == 0
    with pytest.raises(ValueError, match="has no val, and shards cannot be divided: pass --val-fraction to"):
        open_data(DataOptions(path=str(output)), seed=0)
    output = data.parent / "divided"
    assert main(["shard", str(data / "train"), "--out", str(output), "--val-fraction", "0.1"]) == 0
    sets = open_data(DataOptions(path=str(output)), seed=0).sets()
    assert {name: len(images) for name, images in sets.items()} == {"train": 27, "val": 3}


def test_stopped_it_leaves_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second split is interrupted; the first one alone would look like a complete dataset."""
    output, folders = data.parent / "shards", []

    def cut_short(images: ImageSet, folder: Path, **options: object) -> ShardIndex:
        folders.append(folder)
        if len(folders) == 2:
            raise KeyboardInterrupt
        return write_shards(images, folder)

    monkeypatch.setattr("covpool.data.shards.write.write_shards", cut_short)
    assert main(["shard", str(data), "--out", str(output)]) == 130
    assert len(folders) == 2
    assert [path.name for path in data.parent.iterdir()] == ["birds"]
    monkeypatch.undo()
    assert main(["shard", str(data), "--out", str(output)]) == 0
    assert open_splits(output).keys() == {"train", "val"}


@pytest.mark.parametrize("arguments", [["--index", "{}"], ["{}", "--index"], ["{}", "--index", "true"]])
def test_an_index_for_tars(data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    output = data.parent / "shards"
    assert main(["shard", str(data), "--out", str(output)]) == 0
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
    assert capsys.readouterr().err.startswith("covpool shard: extra.tar is truncated, damaged or not a tar")
    (output / "train" / "extra.tar").unlink()
    assert main(["shard", "--index", str(output), "--classes", str(names)]) == 0
    assert open_shards(output / "val").classes == ("jay", "wren", "snow bunting")


def test_what_is_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(memory_images(1).files[0])
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "a.png")
    assert main(["shard", "--index", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "left out: 1 sample without an image, or without a label in .cls"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{}", "--index", "--out", "x"], "--index writes next to the tars: remove --out"),
        (["{}", "--out", "x", "--classes", "y"], "--classes is only for --index: class names come"),
        (["{}", "--out", "x", "--megabytes", "0"], "--megabytes must be at least 1; got 0"),
        (["{}", "--out", "x", "--val-fraction", "1"], "--val-fraction must be from 0 to below 1; got 1.0"),
        (["{}", "--index", "--val-fraction", "0.1"], "--val-fraction is not for --index: existing tars"),
        (["{}/train", "--out", "x", "--val-fraction", "0.01"], "no image can be set aside: 0.01 of"),
        (["{}", "--out", "{}"], "{} exists: use a new folder"),
        (["{}", "--out", "s3://bucket/x"], "s3://bucket/x is not a local folder: use one"),
        (["s3://bucket/x", "--index"], "s3://bucket/x is not a local folder: use one"),
        (["{}/none", "--out", "x"], "{}/none: No such file or directory"),
        (["{}", "--index"], "{} has no tars"),
        (["{}", "--index", "--classes", "{}/none"], "{}/none: No such file or directory"),
        (["{}", "--index", "--classes", "{}/../blank"], "{}/../blank: line 2 is empty"),
        (["{}", "--index", "--classes", "{}/../twice"], "{}/../twice has 'owl' more than once"),
    ],
)
def test_mistakes(
    data: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "blank").write_text("jay\n\nowl\n", "utf-8")
    (data.parent / "twice").write_text("owl\njay\nowl\n", "utf-8")
    before = sorted(data.parent.rglob("*"))
    assert main(["shard", *(word.format(data) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"covpool shard: {sentence.format(data)}")
    assert err.count("\n") == 1
    assert sorted(data.parent.rglob("*")) == before
