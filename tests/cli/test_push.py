"""``covpool push``, and the commands that accept an ``hf-hub:`` address as a bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from covpool.cli.main import main
from covpool.models.bundle import load_model, read_card
from tests.hub_server import TOKEN, Hub, close, running, status
from tests.models.bundles.samples import CLASSES
from tests.models.hub.conftest import bundle, hub, model, pushed

__all__ = ["bundle", "hub", "model", "pushed"]  # fixtures


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in CLASSES:
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = chance.integers(0, 255, (48, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "photos"


def test_push(hub: Hub, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(bundle), "ann/birds", "--license", "mit", "--private"]) == 0
    commit = hub.repositories["ann/birds"].branches["main"]
    assert capsys.readouterr().out == (
        f"pushed: hf-hub:ann/birds@{commit}\nnext: covpool predict hf-hub:ann/birds photos\n"
    )
    assert b"license: mit" in hub.repositories["ann/birds"].commits[commit]["README.md"]
    assert hub.repositories["ann/birds"].private


@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_errors_are_one_sentence_without_the_token(
    hub: Hub,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    hub.fault("POST", "/commit/", status(500))
    assert main(["push", str(bundle), "ann/birds", *options]) == 2
    hub.fault("HEAD", "covpool.json", close)
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "hf-hub:ann/birds", "photos", *options]) == 2
    printed = capfd.readouterr()
    assert TOKEN not in printed.out + printed.err
    assert "covpool push: hf-hub:ann/birds: the Hub answers with status 500: try again later" in printed.err
    assert "covpool predict: hf-hub:ann/birds: the connection to http://127.0.0.1" in printed.err


def test_predictions_are_those_of_the_bundle(hub: Hub, pushed: str, bundle: Path, photos: Path) -> None:
    rows = []
    for i, address in enumerate((str(bundle), pushed, f"{pushed}@main")):
        out = photos.parent / str(i)
        assert main(["predict", address, str(photos), "--format", "csv", "--out", str(out)]) == 0
        (file,) = out.glob("*.csv")
        rows.append(file.read_bytes())
    assert rows[0] == rows[1] == rows[2]
    # A job resumes with the same model from another location.
    assert (
        main(["predict", str(bundle), str(photos), "--format", "csv", "--out", str(photos.parent / "1")]) == 0
    )


@pytest.mark.slow
def test_other_commands_take_an_address(hub: Hub, pushed: str, photos: Path) -> None:
    out, data = photos.parent, str(photos)
    small = ["--epochs", "1", "--batch-size", "4"]
    for words in (
        ["eval", pushed, data, "--out", f"{out}/eval"],
        ["retrieve", pushed, data, "--at", "[1]", "--out", f"{out}/retrieve"],
        ["embed", pushed, data, "--out", f"{out}/embed"],
        ["explain", pushed, data, "--limit", "1", "--out", f"{out}/explain"],
        ["diagnose", pushed, data, "--out", f"{out}/diagnose"],
        ["svm", pushed, data, "--out", f"{out}/svm"],
        ["export", pushed, data, "--formats", "onnx", "--out", f"{out}/export", "--force"],
        ["train", data, "--bundle", pushed, *small, "--out", f"{out}/train"],
        ["push", f"{out}/train/bundle", "ann/mine"],
    ):
        assert main(words) == 0, words
    recipe = read_card("hf-hub:ann/mine").recipe
    assert recipe["weights"]["bundle"] == pushed
    assert recipe["data"]["path"] == "photos"
    results = json.loads((out / "eval" / "results.json").read_bytes())
    assert main(["push", f"{out}/svm", "ann/svm", "--results", f"{out}/eval"]) == 2  # another model
    assert results["arguments"]["bundle"] == pushed


@pytest.mark.slow
def test_a_push_and_a_load_by_other_processes(bundle: Path, tmp_path: Path) -> None:
    """The processes use environment variables, without patches; the logits are bit-identical."""
    code = (
        "import sys, torch, covpool\n"
        "model = covpool.load_model(sys.argv[1])\n"
        "chance = torch.Generator().manual_seed(0)\n"
        "images = torch.randn(2, *model.pretrained_cfg['input_size'], generator=chance)\n"
        "torch.save(model(images).detach(), sys.argv[2])\n"
    )
    with running() as server:
        variables = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        for user, words in (
            ("ann", ["-m", "covpool", "push", str(bundle), "ann/birds"]),
            ("bob", ["-c", code, "hf-hub:ann/birds", str(tmp_path / "logits.pt")]),
        ):
            own = {"HF_HOME": str(tmp_path / user), **({"HF_TOKEN": TOKEN} if user == "ann" else {})}
            environment = {**os.environ, **variables, **own}
            done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert TOKEN not in done.stdout + done.stderr
    model = load_model(bundle)
    size = model.pretrained_cfg["input_size"]
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(images).detach())
    for user in ("ann", "bob"):
        for path in (tmp_path / user).rglob("*"):
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
