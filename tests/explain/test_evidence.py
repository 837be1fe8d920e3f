"""Exact maps sum to the logit, for every supported method and head, and from either side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from covpool import create_model
from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.sources import open_splits
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.explain import evidence_maps
from covpool.explain.evidence import factors
from covpool.explain.explaining import difference
from covpool.models.model import PooledClassifier
from covpool.nn.pooling.isqrt_cov import IsqrtCov
from covpool.nn.pooling.method import Cov, Method
from covpool.nn.pooling.spectral import MpnCov
from tests.data.pictures import SPARROWS, needs_sparrows

EXACT: dict[str, dict[str, Any]] = {
    "isqrt_cov": {},
    "frobenius": {"pool_options": {"normalization": "frobenius"}},
    "one step": {"pool_options": {"iteration": "paper", "steps": 1}},
    "paper": {"pool_options": {"iteration": "paper"}},
    "no compensation": {"pool_options": {"compensation": "none"}},
    "batchnorm": {"pool_options": {"compensation": "batchnorm"}},
    "cov": {"pool": "cov"},
    "mpn_cov": {"pool": "mpn_cov"},
    "mpn_cov, power": {"pool": "mpn_cov", "pool_options": {"power": 0.7, "post_normalization": "frobenius"}},
    "gap": {"pool": "gap", "dim": None},
    "low rank": {"rank": 4},
    "length one, as an SVM": {"normalize": "l2"},
    "low rank of length one": {"normalize": "l2", "rank": 4},
    "joined": {"join": "gap"},
    "joined, of length one": {"join": "gap", "normalize": "l2"},
}
SIDES: tuple[Any, ...] = ("channels", "positions")
BY_GRADIENT: dict[str, dict[str, Any]] = {
    "bcnn": {"pool": "bcnn"},
    "g2denet": {"pool": "g2denet"},
    "hidden layers": {"head": "mlp", "hidden": (16,)},
}


def made(backbone: str = "test_resnet", **options: Any) -> PooledClassifier:
    """Return a network with random values where a new one has zeros or ones."""
    torch.manual_seed(0)
    model = create_model(backbone, **{"dim": 16, "num_classes": 5, **options})
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize("backbone", ["test_resnet", pytest.param("test_vit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_it_sums_to_the_logit(backbone: str, options: dict[str, Any]) -> None:
    model = made(backbone, **options)
    for image in torch.randn(2, 3, 160, 160):
        with torch.no_grad():
            logits = model(image[None])[0]
        for side in SIDES:
            for one in evidence_maps(model, image, [0, 3], side=side):
                assert one.kind == "exact", side
                assert one.logit == pytest.approx(float(logits[one.label]), abs=1e-6), side
                assert difference(one) < 1e-4, side


@needs_sparrows
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_photographs_and_noise(count: int) -> None:
    model = made()
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    images: ImageSet = open_splits(str(SPARROWS))["test"]
    real = [transform(decode(images.read(i))) for i in range(0, len(images), len(images) // count)][:count]
    for side in SIDES:
        gaps = [
            difference(one)
            for image in (*real, *torch.randn(count, 3, 160, 160))
            for one in evidence_maps(model, image, [1], side=side)
        ]
        assert len(gaps) == 2 * count
        assert max(gaps) < 1e-4, side


@pytest.mark.parametrize("options", BY_GRADIENT.values(), ids=BY_GRADIENT)
def test_the_rest_is_by_gradient_and_called_so(options: dict[str, Any]) -> None:
    model = made(**options)
    image = torch.randn(3, 160, 160)
    (one,) = evidence_maps(model, image, [2])
    assert one.kind == "gradient"
    assert one.pairs is None
    # Gradient times features, computed by hand.
    features = model.forward_features(image[None]).detach().requires_grad_()
    model.forward_head(features)[0, 2].backward()
    torch.testing.assert_close(one.positions, (features.grad * features).sum(1)[0].detach())


@pytest.mark.parametrize("options", [EXACT["isqrt_cov"], EXACT["cov"], EXACT["mpn_cov"]])
def test_pairs_sum_to_places(options: dict[str, Any]) -> None:
    (one,) = evidence_maps(made(**options), torch.randn(3, 160, 160), [1], pairs=True)
    assert one.pairs is not None
    assert one.pairs.shape == (100, 100)
    torch.testing.assert_close(one.pairs, one.pairs.T, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(one.pairs.sum(1), one.positions.flatten(), atol=1e-5, rtol=1e-4)


def test_an_average_of_nothing_joined_is_told_apart() -> None:
    (one,) = evidence_maps(made(join="gap"), torch.randn(3, 160, 160), [1])
    assert one.first_order is not None
    assert one.first_order.shape == one.positions.shape
    (alone,) = evidence_maps(made(), torch.randn(3, 160, 160), [1])
    assert alone.first_order is None


def test_a_class_token_has_no_place() -> None:
    model = made("test_vit", join="cls")
    (one,) = evidence_maps(model, torch.randn(3, 160, 160), [1])
    assert one.first_order is None
    assert difference(one) < 1e-4
    with pytest.raises(ValueError, match="a class token has no position in the image"):
        evidence_maps(made("test_vit", pool="cls", dim=None), torch.randn(3, 160, 160), [1])


@pytest.mark.parametrize("method", [Cov, IsqrtCov, MpnCov])
def test_a_place_that_differs_is_credited(method: type[Method]) -> None:
    """The features are the same everywhere except at one position."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 1).repeat(1, 1, 49)
    x[0, :, 17] += torch.randn(8)
    w = torch.randn(8, 8)
    positions = factors(method(8), x).positions(w + w.T)[0].abs()
    assert positions[17] > 0.9 * positions.sum()


def test_training_mode_is_left_as_it_was() -> None:
    model = made().train()
    evidence_maps(model, torch.randn(3, 160, 160), [1])
    assert model.training


def test_no_classifier() -> None:
    with pytest.raises(ValueError, match="no classifier"):
        evidence_maps(made(num_classes=0), torch.randn(3, 160, 160), [0])
