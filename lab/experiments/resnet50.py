"""ResNet-50 as Keras has it: the backbone of the paper, with weights that anyone may download.

It differs from timm's ``resnet50`` in the strides of a stage's first block, and in the preprocessing. timm
learns its name when this module is imported.
"""

from __future__ import annotations

from typing import Any

from timm.models import ResNet, build_model_with_cfg, register_model
from timm.models.resnet import Bottleneck

RESNET50 = "resnet50_keras"
_CONFIG = {
    "url": "",
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "crop_pct": 0.875,
    "interpolation": "bilinear",
    "mean": (0.48502, 0.45796, 0.40760),
    "std": (1 / 255, 1 / 255, 1 / 255),
    "first_conv": "conv1",
    "classifier": "fc",
}


@register_model
def resnet50_keras(pretrained: bool = False, **options: Any) -> ResNet:
    """Return ResNet-50 with stride 2 in the first 1×1 convolution of a stage."""
    model: ResNet = build_model_with_cfg(
        ResNet,
        RESNET50,
        pretrained,
        pretrained_cfg=_CONFIG,
        block=Bottleneck,
        layers=(3, 4, 6, 3),
        **{name: value for name, value in options.items() if not name.startswith("pretrained_cfg")},
    )
    stages: list[Any] = [model.layer2, model.layer3, model.layer4]
    for stage in stages:
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return model
