"""Tuning of heads on held-out images: equal trials, no use of test images, resuming, and the saved heads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import covpool
from covpool.data.loader import EvaluationLoader
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.probe import probe
from covpool.evaluate.probe.features import head_outputs
from covpool.evaluate.probe.options import DEFAULTS, trial_settings
from covpool.evaluate.probe.record import table_cells
from covpool.inference.store import FeatureStore
from covpool.models.bundle import read_card
from covpool.provenance import check_schema
from tests.data.pictures import needs_sparrows
from tests.evaluate.probe.small_probing import OPTIONS

pytestmark = needs_sparrows
HEADS = ("gap", "isqrt_cov", "efficient_probing")
TUNED = dataclasses.replace(OPTIONS, heads=HEADS, seeds=1, epochs=1, tune=True, trials=3)


@pytest.fixture(scope="module")
def tuned(birds: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return probe(str(birds), TUNED, out=tmp_path_factory.mktemp("tuned") / "out", cache=cache)


def test_trials_fill_the_range_and_more_add_to_fewer() -> None:
    few, many = (trial_settings(dataclasses.replace(OPTIONS, trials=n), "gap") for n in (4, 40))
    assert many[:4] == few
    assert few[0] == DEFAULTS["average"]
    assert min(lr for lr, _ in many) < 6e-4
    assert max(lr for lr, _ in many) > 2e-2
    assert all(0 <= drop <= 0.8 for _, drop in many)
    assert len(set(many)) == 40


@pytest.mark.slow
def test_every_head_has_the_same_trials_and_keeps_its_best(tuned: Any) -> None:
    for head in HEADS:
        expected = [tuple(setting) for setting in trial_settings(TUNED, head)]
        trials = [trial for trial in tuned.record["trials"] if trial["head"] == head]
        assert [(trial["lr"], trial["drop_rate"]) for trial in trials] == expected
        best = max(trials, key=lambda trial: (trial["val"]["top1_flip"], trial["val"]["top1"]))
        (row,) = [row for row in tuned.record["rows"] if row["head"] == head]
        assert (row["lr"], row["drop_rate"]) == (best["lr"], best["drop_rate"])
        # The seed, the held-out images and the settings are the same.
        assert row["val"] == best["val"]
        card = read_card(tuned.folder / "heads" / head)
        assert (card.recipe["lr"], card.recipe["drop_rate"]) == (best["lr"], best["drop_rate"])
        assert card.config.drop_rate == best["drop_rate"]


def test_the_file_follows_its_schema(tuned: Any) -> None:
    check_schema(json.loads((tuned.folder / "results.json").read_text()), "covpool.evaluate", "probe")


def test_the_table_has_settings_and_costs(tuned: Any) -> None:
    titles, *rows = table_cells(tuned.record)
    assert titles[-5:] == ["lr", "dropout", "parameters", "vector", "seconds"]
    # For 3 classes: a linear layer on 256 averages; a reduction from 64 to 8 channels with its norm, and 36
    # values; 32 queries and a projection of 256 channels.
    assert [row[-3:-1] for row in rows] == [
        ["771", "256"],
        [f"{64 * 8 + 16 + 36 * 3 + 3:,}", "36"],
        [f"{32 * 256 + 256 * 256 + 771:,}", "256"],
    ]


def test_the_test_images_do_not_decide(tuned: Any, birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "birds"
    shutil.copytree(birds, root)
    first, second = sorted((root / "test").iterdir())[:2]
    for ours, theirs in zip(sorted(first.iterdir()), sorted(second.iterdir()), strict=True):
        data, other = ours.read_bytes(), theirs.read_bytes()
        ours.write_bytes(other)
        theirs.write_bytes(data)
    again = probe(str(root), TUNED, out=tmp_path / "out", cache=tmp_path / "cache")
    assert [trial["val"] for trial in again.record["trials"]] == [
        trial["val"] for trial in tuned.record["trials"]
    ]
    assert again.record["best"] == tuned.record["best"]


def test_a_stop_among_trials_is_resumed(tuned: Any, birds: Path, cache: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "steps of isqrt_cov, trial 2 of 3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(str(birds), TUNED, out=tmp_path / "out", cache=cache, progress=stop)
    counted: list[str] = []
    again = probe(
        str(birds),
        TUNED,
        out=tmp_path / "out",
        cache=cache,
        progress=lambda what, done, total: counted.append(what),
    )
    steps = list(dict.fromkeys(what for what in counted if what.startswith("steps")))
    assert steps[:3] == [
        "steps of isqrt_cov, trial 2 of 3",
        "steps of isqrt_cov, trial 3 of 3",
        "steps of isqrt_cov, seed 0",
    ]
    assert [trial["val"] for trial in again.record["trials"]] == [
        trial["val"] for trial in tuned.record["trials"]
    ]
    assert [row["test"] for row in again.record["rows"]] == [row["test"] for row in tuned.record["rows"]]


def test_other_trials_want_another_folder(tuned: Any, birds: Path, cache: Path) -> None:
    for change, setting in (({"trials": 4}, "trials 3"), ({"tune": False}, "tune True")):
        other = dataclasses.replace(TUNED, **change)
        with pytest.raises(ValueError, match=f"has results with {setting}: use another --out"):
            probe(str(birds), other, out=tuned.folder, cache=cache)


def test_without_held_out_images_there_is_no_tuning(birds: Path, cache: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(TUNED, val_fraction=0.0)
    with pytest.raises(ValueError, match=r"^--tune needs held-out images: use --val-fraction above 0"):
        probe(str(birds), options, out=tmp_path, cache=cache)


@pytest.mark.slow
def test_val_tunes_where_there_is_one(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "birds"
    shutil.copytree(birds, root)
    (root / "test").rename(root / "val")
    options = dataclasses.replace(TUNED, heads=("gap",), val_fraction=0.0, trials=2)
    made = probe(str(root), options, out=tmp_path / "out", cache=tmp_path / "cache")
    best = max(trial["val"]["top1_flip"] for trial in made.record["trials"])
    assert made.record["rows"][0]["val"]["top1_flip"] == best


def test_an_attentive_bundle_does_to_images_what_was_measured_on_features(
    tuned: Any, birds: Path, cache: Path
) -> None:
    """Attention pools the expanded features, which the backbone of the bundle computes."""
    model = covpool.load_model(tuned.folder / "heads" / "efficient_probing")
    assert model.config.features == "head"
    images = open_images(birds, "test")
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    (batch,) = EvaluationLoader(images, transform, batch_size=64)
    with torch.no_grad():
        logits = torch.stack([model(batch.images), model(batch.images.flip(-1))])
    folder = cache / tuned.record["features"]["test"]
    key = json.loads((folder / "manifest.json").read_text())["about"]["key"]
    kept = FeatureStore(folder, key, len(images), {"expanded": (256, 4, 4)}).opened(batch.labels.numpy())
    (found,) = (part for _, part in head_outputs(model, kept, kept.usable))
    torch.testing.assert_close(found, logits, atol=2e-3 * float(logits.abs().max()), rtol=1e-2)


@pytest.mark.slow
def test_attention_of_tokens(birds: Path, tmp_path: Path) -> None:
    """A transformer has no expansion; attention pools the patch tokens."""
    options = dataclasses.replace(
        TUNED, model="test_vit", weights="vit.pth", image_size=None, heads=("attentive",), tune=False
    )
    made = probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    model = covpool.load_model(made.folder / "heads" / "attentive")
    assert model(torch.randn(1, 3, 160, 160)).shape == (1, 3)
