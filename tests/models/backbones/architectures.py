"""Small timm networks of many families, with the expected properties of their features."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A network and its features in a second-order model.

    Attributes:
        name: timm's name.
        channels: number of feature channels, before any expansion.
        stride: image pixels per spatial position.
        kept: whether the last stage keeps its resolution.
        size: image size in pixels for the tests.
        prefix_tokens: number of class, distillation and register tokens, ``None`` for maps.
        fast: whether the fast tests include it, and not only the slow ones.
    """

    name: str
    channels: int
    stride: int = 16
    kept: bool = True
    size: int = 96
    prefix_tokens: int | None = None
    fast: bool = False

    @property
    def side(self) -> int:
        return -(-self.size // self.stride)


FAMILIES: dict[str, list[Architecture]] = {
    "resnet": [
        Architecture("resnet10t", 512, fast=True),
        Architecture("resnext50_32x4d", 2048),
        Architecture("seresnet18", 512),
        Architecture("wide_resnet50_2", 2048),
    ],
    "resnetv2": [Architecture("resnetv2_18", 512)],
    "res2net": [Architecture("res2net50_14w_8s", 2048)],
    "resnest": [Architecture("resnest14d", 2048)],
    "vgg": [Architecture("vgg11_bn", 512), Architecture("vgg11", 512)],
    "densenet": [Architecture("densenet121", 1024)],
    "inception": [
        # Its last halving is partly a function, not a layer, so it stays.
        Architecture("inception_v3", 2048, kept=False, size=107, stride=54),
        Architecture("inception_v4", 1536, size=107, stride=22),
        Architecture("xception41", 2048),
    ],
    "efficientnet": [
        Architecture("tf_efficientnet_lite0", 320),
        Architecture("efficientnet_b0", 320),
        Architecture("tinynet_e", 160),
    ],
    "mobilenet": [
        Architecture("mobilenetv3_small_050", 48),
        Architecture("mobilenetv1_100", 1024),
        Architecture("mobilenetv2_035", 112),
        Architecture("mobilenetv4_conv_small_035", 48),
        Architecture("lcnet_035", 176),
    ],
    "ghostnet": [Architecture("ghostnet_050", 80)],
    "convnext": [
        # It merges 2x2 patches between its stages, so there is no stride to remove.
        Architecture("convnext_atto", 320, stride=32, kept=False),
        Architecture("convnextv2_atto", 320, stride=32, kept=False),
    ],
    "regnet": [Architecture("regnetx_002", 368), Architecture("regnety_002", 368)],
    "repvgg": [Architecture("repvgg_a0", 1280)],
    "rexnet": [Architecture("rexnet_100", 185)],
    "nfnet": [Architecture("dm_nfnet_f0", 1536)],
    "dla": [Architecture("dla46_c", 256)],
    "dpn": [Architecture("dpn48b", 832)],
    "cspnet": [Architecture("cspresnet50", 1024)],
    "hrnet": [Architecture("hrnet_w18_small", 2048, stride=32, kept=False)],
    "hgnet": [Architecture("hgnetv2_b0", 1024)],
    "poolformer": [Architecture("poolformer_s12", 512)],
    "mobilevit": [Architecture("mobilevit_xxs", 80)],
    "fastvit": [Architecture("fastvit_t8", 384)],
    "starnet": [Architecture("starnet_s050", 128)],
    "pvt": [Architecture("pvt_v2_b0", 256)],
    "tiny_vit": [Architecture("tiny_vit_5m_224", 320)],
    "vit": [
        Architecture("vit_tiny_patch16_224", 192, kept=False, prefix_tokens=1),
        Architecture("deit_tiny_distilled_patch16_224", 192, kept=False, prefix_tokens=2),
        Architecture("vit_small_patch14_reg4_dinov2", 384, 14, kept=False, size=98, prefix_tokens=5),
        Architecture("vit_small_patch16_dinov3", 384, kept=False, prefix_tokens=5),
        Architecture("eva02_tiny_patch14_224", 192, 14, kept=False, size=98, prefix_tokens=1),
    ],
    "xcit": [Architecture("xcit_nano_12_p16_224", 128, kept=False, prefix_tokens=1)],
    "cait": [Architecture("cait_xxs24_224", 192, kept=False, prefix_tokens=1)],
    "mixer": [Architecture("mixer_s32_224", 512, stride=32, kept=False, size=224, prefix_tokens=0)],
    "levit": [Architecture("levit_128s", 384, stride=64, kept=False, size=224, prefix_tokens=0)],
    "swin": [
        Architecture("swin_tiny_patch4_window7_224", 768, stride=32, kept=False),
        Architecture("swinv2_tiny_window8_256", 768, stride=32, kept=False, size=128),
    ],
    "maxvit": [Architecture("maxvit_rmlp_pico_rw_256", 256, size=256)],
}

ARCHITECTURES = [architecture for family in FAMILIES.values() for architecture in family]
