"""The example in each verb's help, run unchanged in a folder with birds and a bundle."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from covpool.cli.main import VERBS, command_of, main
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.evaluate.birds import CLASSES, a_bundle
from tests.models.weights.paper_networks import vgg_weights

SIDE = 72
# A file that each example leaves for the user.
LEFT = {
    "demo": "runs/demo/report.html",
    "check": "runs/problems.csv",
    "shard": "birds-shards/train/index.json",
    "lr-find": "runs/train/lr_find.png",
    "fit": "runs/birds/report.html",
    "train": "runs/train/report.html",
    "probe": "runs/probe/results.json",
    "svm": "runs/birds/svm/covpool.json",
    "eval": "runs/birds/evaluation/results.json",
    "retrieve": "runs/birds/retrieval/results.json",
    "explain": "runs/birds/explained/maps.json",
    "diagnose": "runs/birds/diagnosis/diagnosis.png",
    "predict": "runs/predictions/0000000.csv",
    "embed": "runs/embeddings/0000000.parquet",
    "export": "runs/birds/exported/results.json",
    "convert": "runs/paper/bundle/covpool.json",
}
# These verbs print their results, or where the results are.
PRINTED = {"plan", "doctor"}
# ``push`` needs a server, and the others need a fit with sums; their own tests provide them.
ELSEWHERE = {"push", "update", "forget", "merge"}
# These verbs train, compile or trace. Each has its own tests too.
SLOW = {"demo", "diagnose", "doctor", "eval", "explain", "export", "fit", "lr-find", "probe", "retrieve"}
SLOW |= {"svm", "train"}
# The weights of the default backbone may not be installed.
MORE = {"fit": ["--model", "lcnet_050", "--weights", "lcnet_050.pth"]}


def example(verb: str) -> str:
    return command_of(verb).EXAMPLE


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small photographs of six species, twelve of each to learn from and three to test on."""
    folder = tmp_path_factory.mktemp("examples") / "birds"
    for split, name in ((split, name) for split in ("train", "test") for name in CLASSES):
        (folder / split / name).mkdir(parents=True)
        for file in sorted((SPARROWS / split / name).iterdir())[: 12 if split == "train" else 3]:
            with Image.open(file) as image:
                image.convert("RGB").resize((SIDE, SIDE)).save(folder / split / name / file.name)
    return folder


@pytest.fixture
def _here(birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with the images and the bundle that the examples use."""
    (tmp_path / "birds").symlink_to(birds)
    (tmp_path / "photos").symlink_to(birds / "test" / CLASSES[0])
    a_bundle(tmp_path / "runs/birds/bundle")
    monkeypatch.chdir(tmp_path)


def provide(verb: str) -> None:
    """Create the files that only some verbs need."""
    if verb == "fit":  # fit writes runs/birds itself
        shutil.rmtree("runs/birds")
    if verb in ("fit", "probe"):
        torch.save(timm.create_model("lcnet_050", num_classes=0).state_dict(), "lcnet_050.pth")
    if verb == "convert":
        torch.save({"state_dict": vgg_weights(classes=3, dim=16, hidden=8)}, "vgg.pth.tar")


def test_every_verb_has_an_example_of_one_line() -> None:
    assert VERBS.keys() == LEFT.keys() | PRINTED | ELSEWHERE
    for verb in VERBS:
        assert example(verb).startswith(f"covpool {verb}")
        assert len(example(verb)) <= 95


@needs_sparrows
@pytest.mark.usefixtures("_here")
@pytest.mark.filterwarnings("ignore::UserWarning")  # from torch.onnx; users see them too
@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=pytest.mark.slow if verb in SLOW else ())
        for verb in VERBS
        if verb not in ELSEWHERE
    ],
)
def test_pasted(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    provide(verb)
    covpool, *words = shlex.split(example(verb))
    assert covpool == "covpool"
    assert main([*words, *MORE.get(verb, [])]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
    assert verb in PRINTED or Path(LEFT[verb]).is_file()
