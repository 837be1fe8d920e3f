"""The computation of the model, and its timm interface."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from torch import nn

import covpool
from covpool.functional import isqrt_cov, triu_vec
from covpool.models import PooledClassifier
from covpool.models.surgery import build_network, expansion
from tests.models.small_models import IMAGES, on_meta, small


class TestWhatItComputes:
    def test_resnet_against_the_pieces(self) -> None:
        model = small().eval()
        reference = timm.create_model("resnet10t", num_classes=0)
        reference.load_state_dict(model.backbone.state_dict())
        assert reference.layer4[0].conv1.stride == (2, 2)
        assert reference.layer4[0].downsample[0].stride == 2
        reference.layer4[0].conv1.stride = (1, 1)
        reference.layer4[0].downsample[0] = nn.Identity()  # a 2x2 average with stride 2
        with torch.no_grad():
            maps = reference.eval().forward_features(IMAGES)
            assert maps.shape == (2, 512, 4, 4)
            reduction = model.pool.reduction
            x = nn.functional.relu(reduction.norm(nn.functional.conv2d(maps, reduction.projection.weight)))
            vector = triu_vec(isqrt_cov(x.flatten(2)))
            expected = nn.functional.linear(vector, model.head.classifier.weight, model.head.classifier.bias)
            torch.testing.assert_close(model(IMAGES), expected)

    def test_the_first_order_twin_is_timms_own_network(self) -> None:
        model = covpool.create_model("test_efficientnet", pool="gap", num_classes=5).eval()
        reference = timm.create_model("test_efficientnet", num_classes=5).eval()
        names = {name.replace("head.classifier.", "backbone.classifier.") for name in model.state_dict()}
        assert names == {f"backbone.{name}" for name in reference.state_dict()}
        state = {name.removeprefix("backbone."): value for name, value in model.state_dict().items()}
        reference.load_state_dict(
            {name.replace("head.classifier", "classifier"): v for name, v in state.items()}
        )
        with torch.no_grad():
            torch.testing.assert_close(model(IMAGES), reference(IMAGES))

    def test_covariance_is_of_the_patch_tokens_alone(self) -> None:
        model = covpool.create_model("test_vit", dim=8, num_classes=5, image_size=64).eval()
        with torch.no_grad():
            tokens = model.forward_features(IMAGES)
            assert tokens.shape == (2, 17, 64)
            changed = tokens.clone()
            changed[:, 0] += 1.0
            assert torch.equal(model.forward_head(changed), model.forward_head(tokens))
            changed[:, 1] += 1.0
            assert not torch.equal(model.forward_head(changed), model.forward_head(tokens))

    def test_register_tokens_are_left_out_too(self) -> None:
        name = "vit_small_patch14_reg4_dinov2"
        depth = {"depth": 1}
        model = covpool.create_model(name, dim=8, num_classes=5, image_size=56, backbone_options=depth).eval()
        tokens = torch.randn(2, 5 + 16, 384)
        with torch.no_grad():
            changed = tokens.clone()
            changed[:, :5] += 1.0
            assert torch.equal(model.forward_head(changed), model.forward_head(tokens))

    @pytest.mark.parametrize("join", ["cls", "gap"])
    def test_join_adds_first_order_logits(self, join: str) -> None:
        model = covpool.create_model("test_vit", dim=8, num_classes=5, image_size=64, join=join).eval()
        tokens = torch.randn(2, 17, 64)
        with torch.no_grad():
            first = tokens[:, 0] if join == "cls" else tokens[:, 1:].mean(1)
            vector = model.forward_pool(tokens)
            expected = model.head.classifier(vector) + first @ model.first_order.weight.T
            torch.testing.assert_close(model.forward_head(tokens), expected)
            pre_logits = model.forward_head(tokens, pre_logits=True)
            torch.testing.assert_close(pre_logits, torch.cat([vector, first], dim=1))
        assert model.head_hidden_size == 36 + 64
        assert model.get_classifier() == (model.head.classifier, model.first_order)

    def test_normalized_parts_of_a_join(self) -> None:
        model = covpool.create_model(
            "test_vit", dim=8, num_classes=5, image_size=64, join="cls", normalize="l2"
        ).eval()
        tokens = torch.randn(2, 17, 64)
        with torch.no_grad():
            vector, first = (nn.functional.normalize(x) for x in (model.forward_pool(tokens), tokens[:, 0]))
            pre_logits = model.forward_head(tokens, pre_logits=True)
            torch.testing.assert_close(pre_logits, torch.cat([vector, first], dim=1))
            expected = model.head.classifier(vector) + first @ model.first_order.weight.T
            torch.testing.assert_close(model.forward_head(tokens), expected)
            model.reset_classifier(0)
            torch.testing.assert_close(model.forward_head(tokens), pre_logits)

    @pytest.mark.parametrize(
        "backbone", ["resnet10t", pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow)]
    )
    def test_join_gap_on_maps(self, backbone: str) -> None:
        model = covpool.create_model(backbone, dim=8, num_classes=5, join="gap", image_size=64).eval()
        with torch.no_grad():
            features = model.forward_features(IMAGES)
            first = features.mean((1, 2)) if backbone.startswith("swin") else features.mean((2, 3))
            both = model.forward_head(features, pre_logits=True)
        torch.testing.assert_close(both[:, 36:], first)

    # One network of every timm class that has an expansion. NFNet's expansion cannot be applied separately.
    @pytest.mark.parametrize(
        ("backbone", "channels"),
        [
            ("mobilenetv3_small_050", 288),
            ("nf_regnet_b0", 328),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in (
                    ("tf_efficientnet_lite0", 1280),
                    ("ghostnet_050", 480),
                    ("rexnet_100", 1280),
                    ("repghostnet_050", 480),
                    ("fastvit_t8", 768),
                    ("gernet_s", 1920),
                    ("regnetz_b16", 1536),
                )
            ),
        ],
    )
    def test_join_gap_is_of_the_expanded_features(self, backbone: str, channels: int) -> None:
        baseline = covpool.create_model(backbone, pool="gap", num_classes=5).eval()
        joined = covpool.create_model(
            backbone, dim=8, num_classes=5, join="gap", keep_resolution=False
        ).eval()
        if channels != 328:
            names = expansion(build_network(backbone, {}))
            joined.expansion.load_state_dict(
                {
                    f"{place}.{name}": tensor
                    for place, part in enumerate(names)
                    for name, tensor in baseline.backbone.get_submodule(part).state_dict().items()
                }
            )
        joined.backbone.load_state_dict(baseline.backbone.state_dict(), strict=False)
        images = torch.randn(1, 3, 96, 96)
        with torch.no_grad():
            both = joined.forward_head(joined.forward_features(images), pre_logits=True)
            average = baseline.forward_head(baseline.forward_features(images), pre_logits=True)
            if channels == 328:
                average = joined.forward_features(images).mean((2, 3))
        assert joined.head_hidden_size == 36 + channels == both.shape[1]
        torch.testing.assert_close(both[:, 36:], average)

    def test_what_is_joined_is_of_the_backbone(self) -> None:
        model = covpool.create_model("mobilenetv3_small_050", dim=8, num_classes=5, join="gap")
        model.freeze("backbone")
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == {
            *("pool.reduction.projection.weight", "pool.reduction.norm.weight", "pool.reduction.norm.bias"),
            *("head.classifier.weight", "head.classifier.bias", "first_order.weight"),
        }
        assert not model.train().expansion.training

    def test_the_class_token_in_the_place_of_a_pooling(self) -> None:
        model = covpool.create_model(
            "test_vit", pool="cls", num_classes=5, image_size=64, drop_rate=0.5
        ).eval()
        tokens = torch.randn(2, 17, 64)
        with torch.no_grad():
            torch.testing.assert_close(model.forward_head(tokens), model.head.classifier(tokens[:, 0]))
        assert (model.config.dim, model.head_hidden_size) == (None, 64)

    def test_zero_classes_give_the_vector(self) -> None:
        model = small(num_classes=0).eval()
        with torch.no_grad():
            assert model(IMAGES).shape == (2, 36)
            assert torch.equal(model(IMAGES), model.forward_pool(model.forward_features(IMAGES)))

    def test_pool_options_reach_the_method(self) -> None:
        model = on_meta("resnet10t", pool_options={"steps": 4, "compute_dtype": "bfloat16"})
        assert model.pool.pooling.options.steps == 4
        assert model.pool.pooling.options.compute_dtype == torch.bfloat16

    def test_half_precision_and_autocast(self) -> None:
        model = small().eval()
        with torch.no_grad():
            full = model(IMAGES)
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(model(IMAGES).float(), full, atol=0.05, rtol=0.1)
            half = copy.deepcopy(model).bfloat16()
            result = half(IMAGES.bfloat16())
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.float(), full, atol=0.05, rtol=0.1)


class TestTimmsInterface:
    def test_reset_classifier(self) -> None:
        model = small(join="gap").eval()
        model.classes = ("a", "b", "c", "d", "e")
        before = model.get_classifier()
        model.reset_classifier(9)
        assert model.num_classes == model.config.num_classes == 9
        assert model.classes is None
        assert all(new is not old for new, old in zip(model.get_classifier(), before, strict=True))
        with torch.no_grad():
            assert model(IMAGES).shape == (2, 9)
            model.reset_classifier(0)
            assert model(IMAGES).shape == (2, 36 + 512)

    def test_a_new_classifier_is_where_and_what_the_model_is(self) -> None:
        model = small(num_classes=0).bfloat16()
        model.reset_classifier(3)
        assert model.get_classifier().weight.dtype == torch.bfloat16

    def test_data_config(self) -> None:
        model = on_meta("resnet10t", image_size=320, preprocessing={"mean": [0.5, 0.5, 0.5]})
        data = resolve_model_data_config(model)
        assert data["input_size"] == (3, 320, 320)
        assert tuple(data["mean"]) == (0.5, 0.5, 0.5)
        assert data["std"] == timm.get_pretrained_cfg("resnet10t").std

    def test_pretrained_cfg_names_our_layers(self) -> None:
        model = on_meta("vit_tiny_patch16_224", join="cls")
        for key in ("first_conv", "classifier"):
            for name in model.pretrained_cfg[key]:
                assert isinstance(model.get_submodule(name), nn.Conv2d | nn.Linear)

    @pytest.mark.parametrize("backbone", ["resnet10t", "mobilenetv3_small_050"])
    def test_grad_checkpointing_changes_nothing_but_memory(self, backbone: str) -> None:
        model = covpool.create_model(backbone, dim=8, num_classes=5).train()
        with torch.random.fork_rng():
            plain = copy.deepcopy(model)
        model.set_grad_checkpointing()
        for each in (model, plain):
            each(IMAGES).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    def test_thawed_backbone(self) -> None:
        model = small(freeze="backbone").train()
        model.backbone.requires_grad_(True)
        assert model.train().backbone.training

    def test_frozen_backbone(self) -> None:
        model = small(freeze="backbone").train()
        before = copy.deepcopy(model.backbone.state_dict())
        assert model.training
        assert model.pool.training
        model(IMAGES).sum().backward()
        assert all(parameter.grad is None for parameter in model.backbone.parameters())
        assert all(p.grad is not None for part in (model.pool, model.head) for p in part.parameters())
        after = model.backbone.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)  # and the BatchNorm statistics

    def test_the_papers_networks_are_timms(self) -> None:
        names = timm.list_models("isqrt_cov_*")
        assert names == [
            "isqrt_cov_alexnet",
            "isqrt_cov_resnet50",
            "isqrt_cov_resnet101",
            "isqrt_cov_vgg16_bn",
        ]
        with torch.device("meta"):
            model = timm.create_model("isqrt_cov_resnet50", num_classes=10, dim=128)
        assert isinstance(model, PooledClassifier)
        assert model.pool.out_features == 128 * 129 // 2
        with pytest.raises(ValueError, match=r"^this network has no weights to download"):
            timm.create_model("isqrt_cov_resnet50", pretrained=True)

    def test_the_papers_networks_take_timms_options(self) -> None:
        options = {"in_chans": 1, "drop_path_rate": 0.1, "backbone_options": {"act_layer": "silu"}}
        with torch.device("meta"):
            model = timm.create_model("isqrt_cov_resnet50", num_classes=3, dim=4, **options)
            assert model(torch.empty(2, 1, 64, 64)).shape == (2, 3)
        kept = {"zero_init_last": False, "in_chans": 1, "drop_path_rate": 0.1, "act_layer": "silu"}
        assert model.config.backbone_options == kept
        assert model.pretrained_cfg["crop_pct"] == 0.875
