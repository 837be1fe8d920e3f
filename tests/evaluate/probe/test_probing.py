"""Probing on real photographs: some of three sparrow species, with small networks of random weights."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from jsonschema import ValidationError
from sklearn.svm import LinearSVC

import covpool
from covpool.data.loader import EvaluationLoader
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.probe import ProbeOptions, probe
from covpool.evaluate.probe.cache import Shapes
from covpool.provenance.results import check_schema
from tests.data.pictures import SPARROWS, needs_sparrows

pytestmark = needs_sparrows

SPECIES = 3
OPTIONS = ProbeOptions(
    "test_efficientnet", weights="weights.pth", dim=8, seeds=2, epochs=2, workers=0, image_size=64
)


@pytest.fixture(scope="module", autouse=True)
def _weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of weights in the current folder."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("weights"))
    for name in ("test_efficientnet", "test_vit"):
        torch.manual_seed(0)
        network = timm.create_model(name, num_classes=0)
        torch.save(network.state_dict(), "weights.pth" if name == OPTIONS.model else "vit.pth")
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the images of some species."""
    root = tmp_path_factory.mktemp("birds")
    for split in ("train", "test"):
        for species in sorted((SPARROWS / split).iterdir())[:SPECIES]:
            (root / split / species.name).mkdir(parents=True)
            for image in sorted(species.iterdir())[:12]:
                (root / split / species.name / image.name).symlink_to(image)
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def probed(birds: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return probe(str(birds), OPTIONS, out=tmp_path_factory.mktemp("out") / "probe", cache=cache)


def test_every_head_and_seed_has_a_row(probed: Any) -> None:
    assert [(row["head"], row["seed"]) for row in probed.record["rows"]] == [
        (head, seed) for head in ("gap", "isqrt_cov", "isqrt_cov+gap") for seed in (0, 1)
    ]
    for row in probed.record["rows"]:
        for part in ("val", "test"):
            assert 0 <= row[part]["top1"] <= 1
            assert 0 <= row[part]["top1_flip"] <= 1


def test_the_file_follows_its_schema(probed: Any) -> None:
    record = json.loads((probed.folder / "results.json").read_text())
    check_schema(record, "covpool.evaluate", "probe")
    record["rows"][0]["test"]["top1"] = 61.5  # percent
    with pytest.raises(ValidationError):
        check_schema(record, "covpool.evaluate", "probe")


def test_means_and_deviations(probed: Any) -> None:
    rows = [row["test"]["top1_flip"] for row in probed.record["rows"] if row["head"] == "gap"]
    (gap,) = [head for head in probed.record["heads"] if head["head"] == "gap"]
    assert gap["test"]["top1_flip"]["mean"] == pytest.approx(np.mean(rows))
    assert gap["test"]["top1_flip"]["sd"] == pytest.approx(np.std(rows, ddof=1))


def test_the_best_is_chosen_where_the_test_is_not_looked_at(probed: Any) -> None:
    means = {head["head"]: head["val"]["top1_flip"]["mean"] for head in probed.record["heads"]}
    assert means[probed.record["best"]] == max(means.values())


@pytest.mark.parametrize("head", ["gap", "isqrt_cov", "isqrt_cov+gap"])
def test_a_bundle_does_to_images_what_was_measured_on_features(probed: Any, birds: Path, head: str) -> None:
    """The whole way again, from files to the share of right answers, with nothing of the cache."""
    model = covpool.load_model(probed.folder / "heads" / head)
    images = open_images(birds, "test")
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    right = 0
    with torch.no_grad():
        for batch in EvaluationLoader(images, transform, batch_size=8):
            logits = model(batch.images) + model(batch.images.flip(-1))
            right += int((logits.argmax(dim=1) == batch.labels).sum())
    (row,) = [row for row in probed.record["rows"] if (row["head"], row["seed"]) == (head, 0)]
    # Features are kept in float16, so an image or so may fall on the other side.
    assert right == pytest.approx(row["test"]["top1_flip"] * len(images), abs=1.5)
    assert model.classes == images.classes


def test_the_same_call_has_nothing_to_do(probed: Any, birds: Path, cache: Path) -> None:
    counted = []
    again = probe(
        str(birds),
        OPTIONS,
        out=probed.folder,
        cache=cache,
        progress=lambda what, done, total: counted.append(what),
    )
    assert set(counted) == {"images hashed"}
    assert again.record["rows"] == probed.record["rows"]


def test_results_do_not_depend_on_the_cache(probed: Any, birds: Path, tmp_path: Path) -> None:
    fresh = probe(str(birds), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")
    for ours, theirs in zip(fresh.record["rows"], probed.record["rows"], strict=True):
        assert (ours["val"], ours["test"]) == (theirs["val"], theirs["test"])


def test_other_settings_want_another_folder(probed: Any, birds: Path, cache: Path) -> None:
    other = dataclasses.replace(OPTIONS, lr=0.1)
    with pytest.raises(ValueError, match=r"has results with lr 0.003: give another --out"):
        probe(str(birds), other, out=probed.folder, cache=cache)


def test_more_seeds_may_be_asked_for(birds: Path, cache: Path, tmp_path: Path) -> None:
    one = dataclasses.replace(OPTIONS, seeds=1, heads=("gap",), val_fraction=0.0)
    first = probe(str(birds), one, out=tmp_path, cache=cache)
    assert first.record["best"] is None  # nothing was set aside to choose by
    both = probe(str(birds), dataclasses.replace(one, seeds=2), out=tmp_path, cache=cache)
    assert both.record["rows"][:1] == first.record["rows"]
    assert len(both.record["rows"]) == 2


def test_a_changed_image_is_not_taken_for_what_it_was(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(birds, root)
    options = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1)
    probe(str(root), options, out=tmp_path / "a", cache=tmp_path / "cache")
    before = set((tmp_path / "cache").iterdir())
    files = sorted((root / "train").rglob("*.jpg"))
    files[0].write_bytes(files[1].read_bytes())
    probe(str(root), options, out=tmp_path / "b", cache=tmp_path / "cache")
    assert len(set((tmp_path / "cache").iterdir()) - before) == 1  # of train; test is as it was


def test_a_bad_image_is_left_out(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(birds, root)
    sorted((root / "test").rglob("*.jpg"))[3].write_bytes(b"no image")
    options = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1)
    made = probe(str(root), options, out=tmp_path / "out", cache=tmp_path / "cache")
    share = made.record["rows"][0]["test"]["top1"] * (SPECIES * 12 - 1)
    assert share == pytest.approx(round(share))
    assert made.record["images_left_out"] == {"train": 0, "test": 1}


def test_too_much_for_the_disk_is_said_before(birds: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"would take .* GB, more than --max-cache 0.0001: give a larger one"
    ):
        probe(str(birds), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache", max_cache=0.0001)
    assert not (tmp_path / "cache").exists()


def test_averages_alone_take_little_room() -> None:
    maps, averages = Shapes((320, 7, 7), 1280, None), Shapes(None, 1280, None)
    assert maps.bytes(1000) == 2 * 1000 * 2 * (320 * 49 + 1280)
    assert averages.bytes(1000) == 2 * 1000 * 2 * 1280


def test_class_token_and_its_joins(birds: Path, tmp_path: Path) -> None:
    heads = ("cls", "isqrt_cov+cls", "moment_probing+cls", "gap+cls")
    options = dataclasses.replace(
        OPTIONS,
        model="test_vit",
        weights="vit.pth",
        image_size=None,
        heads=heads,
        seeds=1,
        epochs=1,
        val_fraction=0.0,
    )
    made = probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    assert [row["head"] for row in made.record["rows"]] == list(heads)
    for head in heads:
        assert covpool.load_model(made.folder / "heads" / head)(torch.randn(1, 3, 160, 160)).shape == (1, 3)


def test_svms_are_scikit_learns(birds: Path, cache: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(
        OPTIONS, heads=("isqrt_cov+gap",), seeds=1, epochs=1, val_fraction=0.0, svm_seeds=1
    )
    made = probe(str(birds), options, out=tmp_path, cache=cache)
    model = covpool.load_model(made.folder / "heads" / "isqrt_cov+gap")
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    vectors: dict[str, Any] = {}
    for split in ("train", "test"):
        (batch,) = EvaluationLoader(open_images(birds, split), transform, batch_size=64)
        with torch.no_grad():
            both = torch.cat([batch.images, batch.images.flip(-1)])
            received = model.forward_head(model.forward_features(both), pre_logits=True)
        parts = received.split([model.head.hidden_size, received.shape[1] - model.head.hidden_size], dim=1)
        x = torch.cat([torch.nn.functional.normalize(part, dim=1) for part in parts], dim=1).numpy()
        vectors[split] = x, batch.labels.numpy()
    x, labels = vectors["train"]
    svm = LinearSVC(C=1, tol=1e-6, max_iter=10_000).fit(x, np.tile(labels, 2))
    x, labels = vectors["test"]
    scores = svm.decision_function(x).reshape(2, len(labels), -1)
    right = (scores.mean(axis=0).argmax(axis=1) == labels).sum()
    # Features are kept in float16.
    assert made.record["rows"][0]["svm"]["top1_flip"] * len(labels) == pytest.approx(right, abs=1.5)
    assert made.record["heads"][0]["svm"]["top1"]["mean"] == made.record["rows"][0]["svm"]["top1"]


@pytest.mark.parametrize("changes", [{"weights": None}, {"pretrained": True}])
def test_weights_come_from_one_place(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give --pretrained, for timm's, or --weights FILE"):
        dataclasses.replace(OPTIONS, **changes)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("isqrt", "a head must be one of"),
        ("gap+max", "what is joined to a head must be one of"),
        ("gap+gap", "gap\\+gap is gap twice"),
    ],
)
def test_unknown_heads(head: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(OPTIONS, heads=(head,))


def test_killed_it_goes_on(birds: Path, tmp_path: Path) -> None:
    """SIGKILL while features are computed and while heads are trained; it ends as if it never was."""
    words = [
        *(sys.executable, "-m", "covpool", "probe", str(birds), "--model", "test_efficientnet"),
        *("--image-size", "64", "--dim", "8", "--heads", "gap,isqrt_cov", "--seeds", "2", "--epochs", "3"),
        *("--weights", "weights.pth", "--workers", "0", "--cache", str(tmp_path / "cache")),
    ]
    out = tmp_path / "killed"
    for reached in (lambda: (tmp_path / "cache").exists(), lambda: (out / "results.json").exists()):
        process = subprocess.Popen([*words, "--out", str(out)], stdout=subprocess.DEVNULL)
        while not reached() and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    for folder in (out, tmp_path / "whole"):
        subprocess.run([*words, "--out", str(folder)], check=True, capture_output=True, timeout=240)
    killed, whole = (
        json.loads((folder / "results.json").read_text()) for folder in (out, tmp_path / "whole")
    )
    for ours, theirs in zip(killed["rows"], whole["rows"], strict=True):
        assert (ours["head"], ours["seed"], ours["val"], ours["test"]) == (
            *(theirs["head"], theirs["seed"], theirs["val"], theirs["test"]),
        )
