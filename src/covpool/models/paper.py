"""The paper's networks by name: after ``import covpool.models``, timm creates ``isqrt_cov_resnet50``."""

from __future__ import annotations

from typing import Any

from timm.models import register_model

from covpool.errors import UsageError
from covpool.models.convert import PREPROCESSING
from covpool.models.create import create_model
from covpool.models.model import PooledClassifier
from covpool.nn.cov_pool import DIM


@register_model
def isqrt_cov_alexnet(**options: Any) -> PooledClassifier:
    """AlexNet with BatchNorm: covariance of its 256 channels, two hidden layers of 4096."""
    return _create("alexnet", options, dim=None, head="mlp", hidden_batchnorm=True)


@register_model
def isqrt_cov_vgg16_bn(**options: Any) -> PooledClassifier:
    """VGG-D: without its last max-pooling, 512 channels reduced to 256, two hidden layers of 4096."""
    return _create("vgg16_bn", options, head="mlp", drop_rate=0.5)


@register_model
def isqrt_cov_resnet50(**options: Any) -> PooledClassifier:
    """ResNet-50 with its last stage at stride 1, 2048 channels reduced to 256."""
    return _create("resnet50", options, _RESNET)


@register_model
def isqrt_cov_resnet101(**options: Any) -> PooledClassifier:
    """ResNet-101 with its last stage at stride 1, 2048 channels reduced to 256."""
    return _create("resnet101", options, _RESNET)


# timm starts each residual branch at zero, which came after the paper.
_RESNET: dict[str, Any] = {"zero_init_last": False}


def _create(
    backbone: str, options: dict[str, Any], backbone_options: dict[str, Any] | None = None, **network: Any
) -> PooledClassifier:
    pretrained = options.pop("pretrained", False)
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):  # timm passes these always
        options.pop(name, None)
    if pretrained:
        raise UsageError(
            "this network has no weights to download: `covpool convert` reads the authors' files, and "
            f"covpool.create_model({backbone!r}, pretrained=True) starts from timm's backbone"
        )
    network["backbone_options"] = {**(backbone_options or {}), **options.pop("backbone_options", {})}
    settings = {"dim": DIM, "keep_resolution": True, "preprocessing": PREPROCESSING, **network, **options}
    if options.get("global_pool", options.get("pool", "isqrt_cov")) == "isqrt_cov":
        settings["pool_options"] = {"iteration": "paper", **options.get("pool_options", {})}
    return create_model(backbone, **settings)
