"""``covpool convert``: convert a checkpoint of the paper's authors into a bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import covpool
from covpool.cli.main import main
from covpool.cli.models import Converted, text_of_convert
from tests.models.weights.paper_networks import vgg_weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("convert") / "vgg.pth.tar"
    torch.save({"state_dict": vgg_weights(classes=3, dim=16, hidden=8)}, path)
    yield path
    path.unlink()  # pytest would keep this large file


@pytest.mark.slow
def test_a_checkpoint_becomes_a_bundle(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, classes = tmp_path / "bundle", tmp_path / "classes.txt"
    classes.write_text("jay\nwren\nsnow bunting\n", "utf-8")
    names = ["--classes", str(classes)]
    assert main(["convert", str(checkpoint), str(folder), "--steps", "3", *names, "--json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    model = covpool.load_model(folder)
    assert model.classes == ("jay", "wren", "snow bunting")
    assert model.config.pool_options == {"iteration": "paper", "steps": 3}
    parameters = sum(p.numel() for p in model.parameters())
    assert Converted(**json.loads(out)) == Converted("vgg16_bn", 16, 3, 3, parameters, str(folder))
    (folder / "model.safetensors").unlink()


def test_text() -> None:
    assert text_of_convert(Converted("resnet50", 256, 5, 1000, 56_929_832, "a/b")).splitlines() == [
        "resnet50, iSQRT-COV of 256 channels in 5 steps, 1,000 classes, 56.9 M parameters",
        "saved in a/b: covpool.load_model('a/b')",
    ]
    assert "of all channels in" in text_of_convert(Converted("vgg16_bn", None, 5, 10, 1, "a"))


def test_mistakes(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none.pth"), str(tmp_path / "bundle")]) == 2
    assert str(tmp_path / "none.pth") in capsys.readouterr().err
    names = str(tmp_path / "none.txt")
    assert main(["convert", str(checkpoint), str(tmp_path / "bundle"), "--classes", names]) == 2
    assert capsys.readouterr().err == f"covpool convert: {names}: No such file or directory\n"
    assert not (tmp_path / "bundle").exists()
