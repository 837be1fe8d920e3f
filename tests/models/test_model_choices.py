"""Options of create_model: choices, defaults, and errors for wrong values."""

from __future__ import annotations

import json
import logging

import pytest
import timm
import torch
from torch import nn

import covpool
from covpool.errors import KeepResolutionError, UnsupportedBackboneError
from covpool.functional.newton_schulz import FITTED_STEPS
from covpool.models import ModelConfig, build_model
from tests.models.small_models import IMAGES, on_meta, small


class TestChoices:
    @pytest.mark.parametrize(
        ("backbone", "pool", "dim", "expected"),
        [
            ("resnet10t", "isqrt_cov", "auto", 256),
            ("resnet10t", "isqrt_cov", 64, 64),
            ("resnet10t", "isqrt_cov", None, None),
            ("mobilenetv3_small_050", "isqrt_cov", "auto", None),
            ("alexnet", "isqrt_cov", "auto", None),
            ("resnet10t", "gap", "auto", None),
            ("resnet10t", "cbp", "auto", 256),
            ("resnet10t", "moment_probing", "auto", None),
            ("resnet10t", "moment_probing", 64, 64),
        ],
    )
    def test_dim(self, backbone: str, pool: str, dim: object, expected: int | None) -> None:
        model = on_meta(backbone, pool=pool, dim=dim)
        assert model.config.dim == expected
        assert model.pool.dim == expected

    @pytest.mark.parametrize(("features", "channels"), [(None, 64), ("stage", 64), ("head", 256)])
    def test_features_before_or_after_the_expansion(self, features: str | None, channels: int) -> None:
        model = on_meta("test_efficientnet", features=features)
        assert model.num_features == channels
        assert model.config.features == (features or "stage")

    def test_tokens_are_reduced_linearly_and_maps_by_a_convolution(self) -> None:
        assert on_meta("test_vit", dim=8).pool.reduction.kind == "linear"
        assert on_meta("resnet10t", dim=8).pool.reduction.kind == "convolution"
        asked = on_meta("resnet10t", dim=8, pool_options={"reduction": "linear"})
        assert asked.pool.reduction.kind == "linear"

    def test_stride_is_left_where_it_was_when_not_wanted(self) -> None:
        with torch.device("meta"):
            model = covpool.create_model("resnet10t", keep_resolution=False)
            assert model.forward_features(torch.empty(1, 3, 224, 224)).shape[-1] == 7

    def test_where_it_cannot_keep_the_resolution_it_says_why(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "covpool"):
            assert on_meta("test_convnext").config.keep_resolution is False
        assert (
            "the last stage of test_convnext stays as it is: stages.3.downsample.1 joins patches"
            in caplog.text
        )
        with pytest.raises(KeepResolutionError, match=r"^test_convnext cannot keep .* joins patches"):
            on_meta("test_convnext", keep_resolution=True)
        with pytest.raises(KeepResolutionError, match=r"its features are tokens"):
            on_meta("test_vit", keep_resolution=True)

    def test_a_config_makes_the_same_model(self) -> None:
        model = small(rank=3, drop_rate=0.2)
        again = build_model(ModelConfig.from_dict(model.config.to_dict()))
        assert again.config == model.config
        again.load_state_dict(model.state_dict())

    def test_options_of_timm(self) -> None:
        with torch.device("meta"):
            model = covpool.create_model("resnet10t", backbone_options={"in_chans": 1})
            assert model(torch.empty(1, 1, 64, 64)).shape == (1, 1000)

    @pytest.mark.slow
    def test_attention_before_the_last_stage_is_left_alone(self) -> None:
        network = on_meta("mobilenetv4_hybrid_medium").backbone
        strided = [n for n, m in network.named_modules() if getattr(m, "stride", 1) in (2, (2, 2))]
        assert sum(".attn." in name for name in strided) == 8
        assert not any(name.startswith("blocks.3") for name in strided)

    @pytest.mark.slow
    def test_blocks_that_are_fused_later_know_their_stride(self) -> None:
        model = covpool.create_model("fastvit_t8", dim=8, num_classes=5).eval()
        with torch.no_grad():
            before = model(IMAGES)
            assert model.forward_features(IMAGES).shape[-1] == 4
            timm.utils.model.reparameterize_model(model.backbone, inplace=True)
            torch.testing.assert_close(model(IMAGES), before, atol=1e-3, rtol=1e-3)

    def test_a_norm_after_the_average_is_put_before_the_covariance(self) -> None:
        model = on_meta("eva02_tiny_patch14_224", backbone_options={"depth": 1})
        assert isinstance(model.backbone.norm, nn.LayerNorm)
        assert isinstance(model.backbone.fc_norm, nn.Identity)

    def test_registers_are_no_class_token(self) -> None:
        name, depth = "vit_medium_patch16_reg4_gap_256", {"depth": 1}
        assert on_meta(name, backbone_options=depth).format.prefix_tokens == 4
        with pytest.raises(ValueError, match=r"has no class token"):
            on_meta(name, backbone_options=depth, join="cls")

    def test_grown_image_size(self) -> None:
        with torch.device("meta"):
            model = covpool.create_model("test_vit", dim=8, image_size=448)
            assert model.forward_features(torch.empty(1, 3, 448, 448)).shape == (1, 1 + 28 * 28, 64)
        assert model.pretrained_cfg["input_size"] == (3, 448, 448)


class TestMistakes:
    def test_unknown_backbone(self) -> None:
        with pytest.raises(
            UnsupportedBackboneError, match=r"^timm has no backbone 'resnet5O': did you mean resnet50"
        ):
            covpool.create_model("resnet5O")

    @pytest.mark.parametrize(
        "backbone", ["crossvit_9_240", pytest.param("coat_tiny", marks=pytest.mark.slow)]
    )
    def test_features_of_several_scales(self, backbone: str) -> None:
        with pytest.raises(UnsupportedBackboneError, match=f"^{backbone} returns a list as features"):
            covpool.create_model(backbone)

    def test_the_papers_networks_are_no_backbones(self) -> None:
        with pytest.raises(UnsupportedBackboneError, match=r"has its own pooling"):
            on_meta("isqrt_cov_resnet50")

    def test_wrong_option_for_timm(self) -> None:
        with pytest.raises(TypeError, match=r"^resnet10t of timm has no option 'depht': ResNet\.__init__"):
            covpool.create_model("resnet10t", backbone_options={"depht": 3})

    def test_image_size_a_transformer_cannot_take(self) -> None:
        with pytest.raises(UnsupportedBackboneError, match=r"swinv2_tiny_window8_256"):
            covpool.create_model("swinv2_tiny_window8_256", image_size=3)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"join": "cls"}, '^resnet10t has no class token; join="gap"'),
            ({"pool": "cls"}, '^resnet10t has no class token; pool="gap"'),
            ({"join": "max"}, "^join must be one of None, 'cls', 'gap'"),
            ({"normalize": "l1"}, "^normalize must be one of None, 'l2'"),
            ({"pool": "bilinear"}, "^pool must be one of 'gap', 'cov', 'isqrt_cov'"),
            ({"head": "mlp", "rank": 5}, "^rank is a bottleneck before a linear classifier"),
            ({"num_classes": -3}, "^num_classes must be at least 0; got -3"),
            ({"rank": 0}, "^rank must be at least 1; got 0"),
            ({"image_size": 0}, "^image_size must be at least 1; got 0"),
            ({"dim": 0}, "^dim must be at least 1; got 0"),
            ({"head": "mlp", "hidden": (0,)}, "^every width of hidden must be at least 1; got 0"),
            ({"head": "mlp", "hidden": ()}, '^head="mlp" needs the widths of its hidden layers'),
            ({"drop_rate": 1.0}, "^drop_rate must be from 0 to below 1; got 1.0"),
            ({"features": "neck"}, "^features must be one of None, 'stage', 'head'"),
            ({"hidden": (8,)}, '^hidden and hidden_batchnorm are for head="mlp"'),
            ({"hidden_batchnorm": True}, '^hidden and hidden_batchnorm are for head="mlp"'),
            ({"key_map": "order"}, "^key_map says how to read a file: pass checkpoint_path= too"),
            (
                {"backbone_options": {"img_size": 64}},
                "^img_size is not an option here: pass image_size= to create_model",
            ),
            ({"backbone_options": {"output_stride": 16}}, "^output_stride is not for the backbone"),
            ({"pool": "cls", "dim": 8}, "^the class token is taken as it is"),
            ({"pool": "cls", "pool_options": {"stepz": 3}}, "^the class token is taken as it is"),
            ({"pool_options": {"layout": "auto"}}, "^pool_options has layout, which the model sees to"),
            (
                {"preprocessing": {"mean": 0.5}},
                "^mean of preprocessing has a number for each channel; got 0.5",
            ),
            ({"preprocessing": {"size": 3}}, "^preprocessing has no size; the size is image_size="),
            ({"freeze": "head"}, "^freeze must be one of 'backbone'"),
            ({"backbone_options": {"num_classes": 3}}, "^num_classes is not for the backbone"),
        ],
    )
    def test_arguments(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            on_meta("resnet10t", **options)

    def test_a_module_is_no_name(self) -> None:
        with pytest.raises(TypeError, match=r"^backbone is the name of a network of timm; got a Identity"):
            covpool.create_model(nn.Identity())  # type: ignore[arg-type]

    def test_a_dtype_goes_into_json_by_its_name(self) -> None:
        config = ModelConfig("resnet10t", pool_options={"compute_dtype": torch.bfloat16})
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config.with_iteration()

    def test_a_saved_config_names_its_iteration(self) -> None:
        for options in ({"iteration": "fitted", "steps": FITTED_STEPS}, {"iteration": "fitted"}, {}):
            new = ModelConfig("resnet10t", pool_options=options)
            read = ModelConfig.from_dict(json.loads(json.dumps(new.to_dict())))
            assert read.pool_options == {"iteration": "fitted", "steps": FITTED_STEPS}
        other = {"backbone": "resnet10t", "pool": "mpn_cov", "pool_options": {"power": 0.7}}
        assert ModelConfig.from_dict(other).pool_options == {"power": 0.7}

    def test_config_with_an_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"^a model has no dims; it has backbone, backbone_options, dim"):
            ModelConfig.from_dict({"backbone": "resnet10t", "dims": 3})

    def test_pretrained_alexnet(self) -> None:
        with pytest.raises(ValueError, match=r"^there are no pretrained weights of alexnet"):
            covpool.create_model("alexnet", pretrained=True)

    def test_weights_that_timm_has_not(self) -> None:
        with pytest.raises(
            ValueError, match=r"^timm's weights of test_vit4 are not available: No pretrained"
        ):
            covpool.create_model("test_vit4", pretrained=True)

    def test_weights_that_cannot_be_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unreachable(*args: object, **options: object) -> None:
            raise FileNotFoundError("no connection")

        monkeypatch.setattr("timm.models._builder.load_pretrained", unreachable)
        with pytest.raises(
            ValueError, match=r"^timm's weights of resnet10t are not available: no connection"
        ):
            covpool.create_model("resnet10t", pretrained=True)
