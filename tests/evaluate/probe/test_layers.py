"""Heads on several layers: features are cached once, and the bundle gives the measured outputs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import covpool
from covpool.data.loader import EvaluationLoader
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.probe import probe
from covpool.evaluate.probe.features import head_outputs
from covpool.inference.store import FeatureStore
from tests.data.pictures import needs_sparrows
from tests.evaluate.probe.small_probing import OPTIONS

pytestmark = needs_sparrows


@pytest.mark.slow
def test_several_layers_are_cached_once(birds: Path, tmp_path: Path) -> None:
    """One cache serves both fusions. Average pooling always uses the last layer."""
    cache, counted = tmp_path / "cache", []
    made = {}
    for fusion in ("each", "concat"):
        options = dataclasses.replace(
            OPTIONS, heads=("gap", "cov+gap"), layers="last4", fusion=fusion, seeds=1, epochs=1
        )
        counted.clear()
        made[fusion] = probe(
            str(birds),
            options,
            out=tmp_path / fusion,
            cache=cache,
            progress=lambda what, done, total: counted.append(what),
        )
        assert ("images" in counted) is (fusion == "each")
    assert made["each"].record["features"] == made["concat"].record["features"]
    gaps = [one.record["rows"][0]["test"] for one in made.values()]
    assert gaps[0] == gaps[1]

    images = open_images(birds, "test")
    for fusion, one in made.items():
        model = covpool.load_model(one.folder / "heads" / "cov+gap")
        assert (model.config.layers, model.config.fusion) == ("last4", fusion)
        transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
        (batch,) = EvaluationLoader(images, transform, batch_size=64)
        with torch.no_grad():
            logits = torch.stack([model(batch.images), model(batch.images.flip(-1))])
            grid = model.forward_features(batch.images).shape[1:]
        folder = cache / one.record["features"]["test"]
        key = json.loads((folder / "manifest.json").read_text())["about"]["key"]
        shapes = {"average": (256,), "last4": tuple(grid)}
        kept = FeatureStore(folder, key, len(images), shapes).opened(batch.labels.numpy())
        (found,) = (part for _, part in head_outputs(model, kept, kept.usable))
        torch.testing.assert_close(found, logits, atol=2e-3 * float(logits.abs().max()), rtol=1e-2)


@pytest.mark.slow
def test_features_of_the_last_layer_are_the_same_either_way(birds: Path, tmp_path: Path) -> None:
    """forward_intermediates and forward_features give the same features, so the cache may mix them."""
    averages = []
    for layers in ("last", "all-stages"):
        options = dataclasses.replace(OPTIONS, heads=("gap", "cov"), layers=layers, seeds=1, epochs=1)
        cache = tmp_path / f"cache of {layers}"
        made = probe(str(birds), options, out=tmp_path / layers, cache=cache)
        averages.append(np.load(cache / made.record["features"]["test"] / "average.npy"))
    assert averages[0].std() > 0
    np.testing.assert_array_equal(*averages)


@pytest.mark.slow
def test_a_head_of_several_layers_of_tokens(birds: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(
        OPTIONS,
        model="test_vit",
        weights="vit.pth",
        image_size=None,
        heads=("cls", "isqrt_cov"),
        layers="last4",
        seeds=1,
        epochs=1,
    )
    made = probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    model = covpool.load_model(made.folder / "heads" / "isqrt_cov")
    assert model(torch.randn(1, 3, 160, 160)).shape == (1, 3)
    with pytest.raises(ValueError, match='use join="gap" or no join'):
        probe(
            str(birds),
            dataclasses.replace(options, heads=("isqrt_cov+cls",)),
            out=tmp_path / "other",
            cache=tmp_path / "cache",
        )
