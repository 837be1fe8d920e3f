"""The paper's networks: names that timm creates (``isqrt_cov_resnet50``), and their checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import register_model
from torch import Tensor

from covpool.arguments import DIM
from covpool.errors import CheckpointError, UsageError
from covpool.functional.newton_schulz import PAPER_STEPS
from covpool.models.config import ModelConfig
from covpool.models.create import build_model, create_model
from covpool.models.model import PooledClassifier
from covpool.models.weights import load_strictly, read_checkpoint, rename, tensors_in


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


# The authors preprocess as torchvision does: shorter side 256, center crop 224. timm differs for these names.
PREPROCESSING = {
    "mean": list(IMAGENET_DEFAULT_MEAN),
    "std": list(IMAGENET_DEFAULT_STD),
    "interpolation": "bilinear",
    "crop_pct": 0.875,
}

REDUCTION, NORM = "pool.reduction.projection.", "pool.reduction.norm."

# A released ResNet has torchvision's names and those of the reduction.
RELEASED_RESNET = {
    "conv1.": "backbone.conv1.",
    "bn1.": "backbone.bn1.",
    "layer": "backbone.layer",
    "layer_reduce.": REDUCTION,
    "layer_reduce_bn.": NORM,
    "fc.": "head.classifier.",
}
# The authors' training code splits a network into features, representation and classifier.
TRAINED = {
    "representation.conv_dr_block.0.": REDUCTION,
    "representation.conv_dr_block.1.": NORM,
    "classifier.": "head.classifier.",
    "classifier.0.": "head.hidden.0.",
    "classifier.3.": "head.hidden.3.",
    "classifier.6.": "head.classifier.",
}
# The features of a ResNet are numbered; 8 and 9 are the reduction if training started from a released file.
TRAINED_RESNET = {
    "features.0.": "backbone.conv1.",
    "features.1.": "backbone.bn1.",
    **{f"features.{stage + 3}.": f"backbone.layer{stage}." for stage in (1, 2, 3, 4)},
    "features.8.": REDUCTION,
    "features.9.": NORM,
    **TRAINED,
}
VGG = {"features.": "backbone.features.", **TRAINED}

# The layers of the head; a file has only the last or all.
DENSE = ("head.hidden.0.weight", "head.hidden.3.weight", "head.classifier.weight")

# Backbones by blocks per stage (ResNet) and by total convolutions (VGG).
RESNETS = {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101", (3, 8, 36, 3): "resnet152"}
VGGS = {8: "vgg11", 10: "vgg13", 13: "vgg16", 16: "vgg19"}


def convert_checkpoint(path: str | Path, *, steps: int = PAPER_STEPS) -> PooledClassifier:
    """Convert a checkpoint of fast-MPN-COV, the authors' code, to a model with the same logits.

    Supported are the released ResNet-50, ResNet-101 and VGG-D, and the checkpoints of the authors'
    ``main.py``, trained from scratch or from a released file, with any number of classes and any d. Depth,
    classes, d and head are inferred from names and shapes; a missing or unexpected tensor is an error. Only
    tensors and plain values are unpickled.

    The file does not contain the image size. The model uses 224, as the released networks; the authors
    fine-tune on birds, aircraft and cars at 448.

    Args:
        path: the file, ``.pth`` or ``.pth.tar``.
        steps: Newton-Schulz iterations, which the file does not contain either; the authors use 5.

    Raises:
        CheckpointError: if the file is not such a checkpoint. A training checkpoint with ``--lr-method log``
            contains pickled numpy values, which are refused; the message explains how to extract the tensors.
    """
    content = read_checkpoint(path)
    tensors = _as_ours(tensors_in(content, path), path)
    config = _config(tensors, arch=str(content.get("arch", "")), steps=steps, path=path)
    # Built on the meta device and then given the file's tensors, so VGG-D's weights are in memory only once.
    with torch.device("meta"):
        model = build_model(config)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    load_strictly(model, tensors, path, assign=True)
    return model


def _as_ours(tensors: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors under covpool's names."""
    # DataParallel may wrap the whole network, only its features, or nothing.
    plain = {re.sub(r"^(module\.)?(features\.)?(module\.)?", r"\2", k): v for k, v in tensors.items()}
    if "conv1.weight" in plain:
        key_map = RELEASED_RESNET
    elif "features.4.0.conv1.weight" in plain:
        key_map = TRAINED_RESNET
    elif "features.0.weight" in plain:
        key_map = VGG
    else:
        raise CheckpointError(
            f"{path} is not a fast-MPN-COV checkpoint: its first tensor is {next(iter(plain))}"
        )
    return rename(plain, key_map, path)


def _config(tensors: Mapping[str, Tensor], *, arch: str, steps: int, path: str | Path) -> ModelConfig:
    """Infer the architecture from the tensors."""
    classifier = _weight(tensors, DENSE[-1], path)
    dense = [_weight(tensors, name, path) for name in DENSE if name in tensors]
    head: dict[str, Any] = {}
    if len(dense) > 1:
        head = {"head": "mlp", "hidden": tuple(len(weight) for weight in dense[:-1]), "drop_rate": 0.5}
    return ModelConfig(
        backbone=_backbone(tensors, path),
        num_classes=len(classifier),
        dim=_dim(tensors, dense[0].shape[1], path),
        # An ordinary ResNet trained with the paper's pooling has the same names as the paper's ResNet.
        keep_resolution=not arch.startswith("resnet"),
        pool_options={"iteration": "paper", "steps": steps},
        preprocessing=dict(PREPROCESSING),
        **head,
    )


def _backbone(tensors: Mapping[str, Tensor], path: str | Path) -> str:
    """Return the backbone's name in timm, from the number of its layers."""
    if "backbone.conv1.weight" in tensors:
        numbers = re.findall(r"backbone\.layer([1-4])\.(\d+)\.conv1\.weight", "\n".join(tensors))
        blocks = tuple(sum(stage == number for number, _ in numbers) for stage in "1234")
        if blocks not in RESNETS:
            listed = ", ".join(RESNETS.values())
            raise CheckpointError(f"{path} has {blocks} blocks in its stages, unlike {listed}")
        return RESNETS[blocks]
    convolutions = sum(name.startswith("backbone.") and v.ndim == 4 for name, v in tensors.items())
    if convolutions not in VGGS:
        raise CheckpointError(
            f"{path} has {convolutions} convolutions in a row, unlike {', '.join(VGGS.values())}"
        )
    batchnorm = any(name.endswith("running_var") for name in tensors if name.startswith("backbone."))
    return VGGS[convolutions] + ("_bn" if batchnorm else "")


def _dim(tensors: Mapping[str, Tensor], length: int, path: str | Path) -> int | None:
    """Return d, or ``None`` without a reduction, from the length of the pooled vector."""
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if d * (d + 1) // 2 != length:
        raise CheckpointError(
            f"{path} has no covariance pooling: its classifier takes {length} values, which is not d(d+1)/2. "
            "covpool.create_model(..., checkpoint_path=...) loads its backbone"
        )
    return d if f"{REDUCTION}weight" in tensors else None


def _weight(tensors: Mapping[str, Tensor], name: str, path: str | Path) -> Tensor:
    if name not in tensors or tensors[name].ndim != 2:
        raise CheckpointError(f"{path} has no known classifier: {name} should be a matrix")
    return tensors[name]
