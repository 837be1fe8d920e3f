"""Probing on real photographs: the measurements, the choice of the best head, and the saved bundles."""

from __future__ import annotations

import dataclasses
import json
import shutil
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
from covpool.evaluate.probe import probe
from covpool.evaluate.probe.features import head_outputs
from covpool.evaluate.probe.probing import right_answers
from covpool.inference.store import FeatureStore
from covpool.provenance import check_schema
from tests.data.pictures import needs_sparrows
from tests.evaluate.probe.small_probing import OPTIONS

pytestmark = needs_sparrows


@pytest.mark.slow
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
    record["rows"][0]["test"]["top1"] = 61.5  # in percent, which is wrong
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


def test_the_test_has_no_say_in_the_choice(probed: Any, birds: Path, tmp_path: Path) -> None:
    """Other test images under the same names change neither the choice nor the validation results."""
    root = tmp_path / "birds"
    shutil.copytree(birds, root)
    first, second = sorted((root / "test").iterdir())[:2]
    for ours, theirs in zip(sorted(first.iterdir()), sorted(second.iterdir()), strict=True):
        data, other = ours.read_bytes(), theirs.read_bytes()
        ours.write_bytes(other)
        theirs.write_bytes(data)
    again = probe(str(root), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")
    assert again.record["best"] == probed.record["best"]
    for ours, theirs in zip(again.record["rows"], probed.record["rows"], strict=True):
        assert ours["val"] == theirs["val"]
    # The test images were different.
    assert again.record["features"]["train"] == probed.record["features"]["train"]
    assert again.record["features"]["test"] != probed.record["features"]["test"]


@pytest.mark.parametrize("head", ["gap", "isqrt_cov", "isqrt_cov+gap"])
def test_a_bundle_does_to_images_what_was_measured_on_features(
    probed: Any, birds: Path, cache: Path, head: str
) -> None:
    """Compute the logits again from the image files, without the cache."""
    model = covpool.load_model(probed.folder / "heads" / head)
    images = open_images(birds, "test")
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    (batch,) = EvaluationLoader(images, transform, batch_size=64)
    with torch.no_grad():
        logits = torch.stack([model(batch.images), model(batch.images.flip(-1))])
    folder = cache / probed.record["features"]["test"]
    key = json.loads((folder / "manifest.json").read_text())["about"]["key"]
    kept = FeatureStore(folder, key, len(images), shapes_of(model)).opened(batch.labels.numpy())
    # Features are kept in float16.
    (found,) = (part for _, part in head_outputs(model, kept, kept.usable))
    torch.testing.assert_close(found, logits, atol=2e-3 * float(logits.abs().max()), rtol=1e-2)
    (row,) = [row for row in probed.record["rows"] if (row["head"], row["seed"]) == (head, 0)]
    assert right_answers([(found, batch.labels.numpy())]) == row["test"]
    assert model.classes == images.classes


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    average = {"average": (256,)}
    return average if model.config.pool == "gap" else average | {"features": (48, 4, 4)}


@pytest.mark.slow
def test_results_do_not_depend_on_the_cache(probed: Any, birds: Path, tmp_path: Path) -> None:
    fresh = probe(str(birds), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")
    for ours, theirs in zip(fresh.record["rows"], probed.record["rows"], strict=True):
        assert (ours["val"], ours["test"]) == (theirs["val"], theirs["test"])


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_backbone_whose_expansion_is_not_apart(birds: Path, tmp_path: Path) -> None:
    torch.save(timm.create_model("test_nfnet", num_classes=0).state_dict(), tmp_path / "nfnet.pth")
    options = dataclasses.replace(
        OPTIONS,
        model="test_nfnet",
        weights=str(tmp_path / "nfnet.pth"),
        heads=("isqrt_cov+gap",),
        seeds=1,
        epochs=1,
        val_fraction=0.0,
    )
    made = probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    assert len(made.record["rows"]) == 1
