"""Calls that timm users write: each works as in timm, or the error says what to write instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import resolve_model_data_config

import covpool
from covpool.data.transforms import Augmentation, Preprocessing, training_transform
from tests.models.small_models import IMAGES, on_meta, small


class TestKeywords:
    def test_keywords_reach_the_backbone_and_the_bundle(self, tmp_path: Path) -> None:
        model = small(in_chans=1, drop_path_rate=0.2, act_layer="silu").eval()
        assert model.config.backbone_options == {"in_chans": 1, "drop_path_rate": 0.2, "act_layer": "silu"}
        covpool.save_model(model, tmp_path / "bundle")
        again = covpool.load_model(tmp_path / "bundle")
        assert again.config == model.config
        assert resolve_model_data_config(again) == resolve_model_data_config(model)
        with torch.no_grad():
            assert torch.equal(again(IMAGES[:, :1]), model(IMAGES[:, :1]))

    def test_where_the_weights_are_is_not_part_of_the_network(self, tmp_path: Path) -> None:
        theirs = timm.create_model("resnet10t")
        torch.save(theirs.state_dict(), tmp_path / "weights.pth")
        overlay = {"file": str(tmp_path / "weights.pth"), "mean": (0.5, 0.5, 0.5)}
        model = small(pretrained=True, pretrained_cfg_overlay=overlay, cache_dir=str(tmp_path))
        assert torch.equal(model.backbone.conv1[0].weight, theirs.conv1[0].weight)
        assert model.initial_weights["file"] == "weights.pth"
        covpool.save_model(model, tmp_path / "bundle")
        again = covpool.load_model(tmp_path / "bundle")
        assert again.config == model.config
        assert again.config.backbone_options == {}
        assert tuple(again.pretrained_cfg["mean"]) == (0.5, 0.5, 0.5)

    def test_a_keyword_of_neither_library(self) -> None:
        with pytest.raises(
            TypeError, match=r"^resnet10t of timm has no option 'colour': .*unexpected keyword"
        ):
            covpool.create_model("resnet10t", colour="red")

    def test_a_misspelled_keyword(self) -> None:
        with pytest.raises(TypeError, match=r"no option 'keep_resoluton': did you mean keep_resolution\?$"):
            covpool.create_model("resnet10t", keep_resoluton=True)

    def test_features_only(self) -> None:
        with pytest.raises(
            ValueError, match=r"^features_only=True .* timm\.create_model.* or forward_interm"
        ):
            covpool.create_model("resnet10t", features_only=True)
        assert on_meta("resnet10t", features_only=False).config.backbone_options == {}

    @pytest.mark.parametrize(("theirs", "ours"), [("avg", "gap"), ("token", "cls"), ("cov", "cov")])
    def test_global_pool(self, theirs: str, ours: str) -> None:
        assert on_meta("test_vit", global_pool=theirs).config == on_meta("test_vit", pool=ours).config

    @pytest.mark.parametrize("theirs", ["", "max", "catavgmax"])
    def test_a_global_pool_of_timm_alone(self, theirs: str) -> None:
        with pytest.raises(
            ValueError, match=r"^global_pool must be one of 'avg', 'token', 'gap', 'cov', .*got"
        ):
            on_meta("resnet10t", global_pool=theirs)

    def test_two_names_of_the_pooling(self) -> None:
        assert on_meta("resnet10t", pool="gap", global_pool="avg").config.pool == "gap"
        with pytest.raises(ValueError, match=r"^pool='cov' and global_pool='avg' differ: pass one of them"):
            on_meta("resnet10t", pool="cov", global_pool="avg")


class TestGrayImages:
    def test_pretrained_weights_are_converted_as_timm_does(self, tmp_path: Path) -> None:
        torch.save(timm.create_model("resnet10t").state_dict(), tmp_path / "rgb.pth")
        overlay = {"file": str(tmp_path / "rgb.pth")}
        theirs = timm.create_model("resnet10t", pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1)
        ours = small(checkpoint_path=tmp_path / "rgb.pth", in_chans=1)
        assert torch.equal(ours.backbone.conv1[0].weight, theirs.conv1[0].weight)
        again = small(checkpoint_path=tmp_path / "rgb.pth", key_map="order", in_chans=1)
        assert torch.equal(again.backbone.conv1[0].weight, theirs.conv1[0].weight)

    def test_photographs_become_gray(self) -> None:
        model = small(in_chans=1, image_size=64)
        rng = np.random.default_rng(0)
        photo = Image.fromarray(rng.integers(0, 256, (80, 100, 3), dtype=np.uint8))
        tensor = model.transform(photo)
        assert tensor.shape == (1, 64, 64)
        color = small(image_size=64, preprocessing={"mean": [0.0] * 3, "std": [1.0] * 3}).transform(photo)
        weights = torch.tensor([0.2989, 0.587, 0.114])[:, None, None]
        (mean,), (std,) = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        assert mean == pytest.approx((0.485 + 0.456 + 0.406) / 3)
        torch.testing.assert_close(tensor[0], ((color * weights).sum(0) - mean) / std, rtol=1e-3, atol=1e-3)
        assert len(model.predict(photo, top=2)) == 2

    @pytest.mark.parametrize("colour", ["none", "lighting", "jitter"])
    def test_training_images_become_gray(self, colour: str) -> None:
        preprocessing = Preprocessing(size=32, mean=(0.5,), std=(0.25,))
        photo = Image.new("RGB", (40, 40), (10, 200, 30))
        found = training_transform(preprocessing, Augmentation(colour=colour))(photo)  # type: ignore[arg-type]
        assert found.shape == (1, 32, 32)

    def test_other_channels_are_for_tensors(self) -> None:
        model = small(in_chans=5).eval()
        with torch.no_grad():
            assert model(torch.randn(2, 5, 64, 64)).shape == (2, 5)
        with pytest.raises(ValueError, match=r"^images must be .*; got \(5, 176, 176\): pass tensors to the"):
            model.predict(Image.new("RGB", (64, 64)))


class TestStages:
    @pytest.mark.parametrize("backbone", ["resnet10t", "test_efficientnet", "test_vit"])
    @pytest.mark.parametrize("keep", [None, False])
    def test_feature_info_describes_the_intermediates(self, backbone: str, keep: bool | None) -> None:
        with torch.device("meta"):
            model = covpool.create_model(backbone, keep_resolution=keep, image_size=64).eval()
            final, maps = model.forward_intermediates(torch.empty(2, 3, 64, 64))
            assert final.shape == model.forward_features(torch.empty(2, 3, 64, 64)).shape
        assert [(m.shape[1], 64 // m.shape[2]) for m in maps] == [
            (stage["num_chs"], stage["reduction"]) for stage in model.feature_info
        ]

    def test_arguments_of_forward_intermediates(self) -> None:
        with torch.device("meta"):
            maps = on_meta("resnet10t").forward_intermediates(
                torch.empty(2, 3, 64, 64), 2, stop_early=True, intermediates_only=True
            )
        assert [tuple(m.shape[1:]) for m in maps] == [(256, 4, 4), (512, 4, 4)]

    def test_a_backbone_without_them(self) -> None:
        model = on_meta("alexnet")
        assert not hasattr(model, "feature_info")
        with pytest.raises(ValueError, match=r"^alexnet has no forward_intermediates"):
            model.forward_intermediates(IMAGES)


class TestResetClassifier:
    def test_avg_is_the_average(self) -> None:
        model = small().eval()
        model.reset_classifier(3, "avg")
        with torch.no_grad():
            maps = model.forward_features(IMAGES)
            torch.testing.assert_close(model(IMAGES), model.get_classifier()(maps.mean((2, 3))))
        assert (model.config.pool, model.config.dim, model.num_classes) == ("gap", None, 3)

    @pytest.mark.parametrize(
        ("before", "after"), [("isqrt_cov", "gap"), ("gap", "isqrt_cov"), ("isqrt_cov", "cov")]
    )
    def test_a_bundle_of_another_pooling(self, before: str, after: str, tmp_path: Path) -> None:
        options = {"pool_options": {"steps": 3}} if before == "isqrt_cov" else {"dim": None}
        model = small(pool=before, join="gap", **options).bfloat16().eval()
        model.reset_classifier(4, global_pool=after)
        covpool.save_model(model, tmp_path / "bundle")
        again = covpool.load_model(tmp_path / "bundle")
        with torch.no_grad():
            found = again(IMAGES.bfloat16())
            assert torch.equal(found, model(IMAGES.bfloat16()))
        assert found.shape == (2, 4)
        assert again.config.dim == {"gap": None, "isqrt_cov": 256, "cov": 8}[after]

    def test_the_same_pooling_keeps_its_reduction(self) -> None:
        model = small()
        before = model.pool
        model.reset_classifier(3, "isqrt_cov")
        assert model.pool is before

    def test_a_pooling_that_is_refused_changes_nothing(self) -> None:
        model = small()
        for name, message in (("max", "^global_pool must be one of 'avg'"), ("token", "has no class token")):
            with pytest.raises(ValueError, match=message):
                model.reset_classifier(3, name)
        assert model.config == small().config
        assert model.num_classes == 5

    def test_a_frozen_backbone_stays_frozen(self) -> None:
        model = small(freeze="backbone").train()
        model.reset_classifier(3, "cov")
        assert not model.backbone.training
        assert model.pool.training
        assert all(parameter.requires_grad for parameter in model.pool.parameters())
