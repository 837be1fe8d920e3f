"""Models that pool several layers of a backbone."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

import covpool
from covpool.explain.evidence import evidence_maps
from covpool.nn.fusion import layer_maps, stacked


@pytest.fixture(scope="module")
def network() -> timm.models.EfficientNet:
    torch.manual_seed(0)
    return timm.create_model("test_efficientnet", num_classes=0).eval()


def test_one_grid(network: timm.models.EfficientNet) -> None:
    """Finer maps are averaged. The last map is repeated, which keeps its mean and covariance."""
    with torch.no_grad():
        _, maps = layer_maps(network, torch.randn(2, 3, 96, 96), "all-stages")
        x = stacked(maps)
    last, channels = maps[-1], [one.shape[1] for one in maps]
    assert len(maps) == len(network.feature_info)
    assert x.shape == (2, sum(channels), 2 * last.shape[2], 2 * last.shape[3])
    parts = x.split(channels, dim=1)
    torch.testing.assert_close(parts[-1][..., ::2, 1::2], last)
    torch.testing.assert_close(
        covpool.functional.covariance(parts[-1].flatten(2)), covpool.functional.covariance(last.flatten(2))
    )
    for part, one in zip(parts[:-1], maps[:-1], strict=True):
        torch.testing.assert_close(part.mean((2, 3)), one.mean((2, 3)))


@pytest.mark.parametrize("fusion", ["each", "concat"])
@pytest.mark.parametrize("backbone", ["test_efficientnet", "test_vit", "test_resnet"])
def test_models_of_several_layers_are_saved_and_loaded(backbone: str, fusion: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = covpool.create_model(
        backbone, dim=8, num_classes=3, layers="last4", fusion=fusion, join="gap", keep_resolution=False
    ).eval()
    images = torch.randn(2, 3, *model.pretrained_cfg["input_size"][1:])
    with torch.no_grad():
        logits = model(images)
        assert len(model.format.layers) == min(4, len(model.feature_info))
        # The joined average is that of the last layer only.
        single = covpool.create_model(backbone, dim=8, join="gap", keep_resolution=False).eval()
        single.backbone.load_state_dict(model.backbone.state_dict())
        if model.expansion is not None:
            single.expansion.load_state_dict(model.expansion.state_dict())
        torch.testing.assert_close(
            model.forward_first_order(model.forward_features(images)),
            single.forward_first_order(single.forward_features(images)),
        )
        covpool.save_model(model, tmp_path / "bundle")
        loaded = covpool.load_model(tmp_path / "bundle")
        assert (loaded.config.layers, loaded.config.fusion) == ("last4", fusion)
        torch.testing.assert_close(loaded(images), logits)


@pytest.mark.parametrize("fusion", ["each", "concat"])
def test_explanations_sum_to_the_logit(fusion: str) -> None:
    torch.manual_seed(0)
    model = covpool.create_model(
        "test_efficientnet", dim=8, num_classes=3, layers="last4", fusion=fusion, join="gap"
    ).eval()
    image = torch.randn(3, 96, 96)
    for found in evidence_maps(model, image, [0, 2]):
        assert found.kind == "exact"
        total = float(found.positions.sum()) + float(found.first_order.sum()) + found.rest
        assert total == pytest.approx(found.logit, abs=1e-4)
        if fusion == "each":
            assert found.layers.shape == (4, *found.positions.shape)
            torch.testing.assert_close(found.layers.sum(0), found.positions)
        else:
            assert found.layers is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "gap"}, "layers='last4' is for second-order pooling; got pool='gap'"),
        ({"join": "cls"}, 'use join="gap" or no join'),
        ({"features": "head"}, "pools maps before the expansion"),
        ({"layers": "first"}, "layers must be one of"),
        ({"fusion": "sum"}, "fusion must be one of"),
    ],
)
def test_wrong_choices_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        covpool.create_model("test_vit", **{"layers": "last4", **options})
