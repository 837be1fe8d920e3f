"""Convert a fast-MPN-COV checkpoint to a bundle."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from covpool.errors import CheckpointError
from covpool.functional.newton_schulz import STEPS
from covpool.models.config import ModelConfig
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.models.weights import load_strictly, read_checkpoint, rename, tensors_in

# Their preprocessing is torchvision's: shorter side 256, center 224. timm's for the same names is another.
PREPROCESSING = {
    "mean": list(IMAGENET_DEFAULT_MEAN),
    "std": list(IMAGENET_DEFAULT_STD),
    "interpolation": "bilinear",
    "crop_pct": 0.875,
}

REDUCTION, NORM = "pool.reduction.projection.", "pool.reduction.norm."

# A released ResNet has torchvision's names and two more.
RELEASED_RESNET = {
    "conv1.": "backbone.conv1.",
    "bn1.": "backbone.bn1.",
    "layer": "backbone.layer",
    "layer_reduce.": REDUCTION,
    "layer_reduce_bn.": NORM,
    "fc.": "head.classifier.",
}
# Training takes a network apart into features, representation and classifier.
TRAINED = {
    "representation.conv_dr_block.0.": REDUCTION,
    "representation.conv_dr_block.1.": NORM,
    "classifier.": "head.classifier.",
    "classifier.0.": "head.hidden.0.",
    "classifier.3.": "head.hidden.3.",
    "classifier.6.": "head.classifier.",
}
# The features of a ResNet are numbered; 8 and 9 are the reduction where training began from a released file.
TRAINED_RESNET = {
    "features.0.": "backbone.conv1.",
    "features.1.": "backbone.bn1.",
    **{f"features.{stage + 3}.": f"backbone.layer{stage}." for stage in (1, 2, 3, 4)},
    "features.8.": REDUCTION,
    "features.9.": NORM,
    **TRAINED,
}
VGG = {"features.": "backbone.features.", **TRAINED}

# The layers of the head, of which a file has the last or all.
DENSE = ("head.hidden.0.weight", "head.hidden.3.weight", "head.classifier.weight")

# Blocks a stage, and convolutions in all.
RESNETS = {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101", (3, 8, 36, 3): "resnet152"}
VGGS = {8: "vgg11", 10: "vgg13", 13: "vgg16", 16: "vgg19"}


def convert_checkpoint(path: str | Path, *, steps: int = STEPS) -> PooledClassifier:
    """Read a checkpoint of fast-MPN-COV, the authors' code, into a model that gives the same logits.

    These are read: their released ResNet-50, ResNet-101 and VGG-D, and what their ``main.py`` writes in
    training, from scratch or from a released file, with any number of classes and any d. Depth, classes, d
    and head are inferred from the file's names and shapes; a tensor too many or too few is an error. Pickles
    are read as tensors and plain values alone.

    What the file cannot tell is the size of the images. The model says 224, that of the released networks;
    the authors' fine-tuning on birds, aircraft and cars takes 448.

    Args:
        path: the file, ``.pth`` or ``.pth.tar``.
        steps: Newton-Schulz iterations, which the file does not tell either; the authors' networks have 5.

    Raises:
        CheckpointError: where it is no such file, in one sentence. A training checkpoint with the learning
            rate ``--lr-method log`` holds numbers of numpy, which are refused like all that is pickled; the
            message says how to take the tensors out.
    """
    content = read_checkpoint(path)
    tensors = _as_ours(tensors_in(content, path), path)
    config = _config(tensors, arch=str(content.get("arch", "")), steps=steps, path=path)
    # Built without memory, then given the file's own tensors: VGG-D's weights are in memory once, not twice.
    with torch.device("meta"):
        model = build_model(config)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    load_strictly(model, tensors, path, assign=True)
    return model


def _as_ours(tensors: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """The tensors under covpool's names."""
    # DataParallel was around the whole network, around its features, or nowhere.
    plain = {re.sub(r"^(module\.)?(features\.)?(module\.)?", r"\2", k): v for k, v in tensors.items()}
    if "conv1.weight" in plain:
        key_map = RELEASED_RESNET
    elif "features.4.0.conv1.weight" in plain:
        key_map = TRAINED_RESNET
    elif "features.0.weight" in plain:
        key_map = VGG
    else:
        raise CheckpointError(f"{path} is no network of fast-MPN-COV: its first name is {next(iter(plain))}")
    return rename(plain, key_map, path)


def _config(tensors: Mapping[str, Tensor], *, arch: str, steps: int, path: str | Path) -> ModelConfig:
    """The architecture, from what the file has."""
    classifier = _weight(tensors, DENSE[-1], path)
    dense = [_weight(tensors, name, path) for name in DENSE if name in tensors]
    head: dict[str, Any] = {}
    if len(dense) > 1:
        head = {"head": "mlp", "hidden": tuple(len(weight) for weight in dense[:-1]), "drop_rate": 0.5}
    return ModelConfig(
        backbone=_backbone(tensors, path),
        num_classes=len(classifier),
        dim=_dim(tensors, dense[0].shape[1], path),
        # An ordinary ResNet, not the paper's, may have been trained with the paper's pooling: same names.
        keep_resolution=not arch.startswith("resnet"),
        pool_options={"steps": steps},
        preprocessing=dict(PREPROCESSING),
        **head,
    )


def _backbone(tensors: Mapping[str, Tensor], path: str | Path) -> str:
    """Its name in timm, by counting."""
    if "backbone.conv1.weight" in tensors:
        found = re.findall(r"backbone\.layer([1-4])\.(\d+)\.conv1\.weight", "\n".join(tensors))
        blocks = tuple(sum(stage == number for number, _ in found) for stage in "1234")
        if blocks not in RESNETS:
            listed = ", ".join(RESNETS.values())
            raise CheckpointError(f"{path} has {blocks} blocks in its stages, which is none of {listed}")
        return RESNETS[blocks]
    convolutions = sum(name.startswith("backbone.") and v.ndim == 4 for name, v in tensors.items())
    if convolutions not in VGGS:
        raise CheckpointError(
            f"{path} has {convolutions} convolutions in a row, which is none of {', '.join(VGGS.values())}"
        )
    batchnorm = any(name.endswith("running_var") for name in tensors if name.startswith("backbone."))
    return VGGS[convolutions] + ("_bn" if batchnorm else "")


def _dim(tensors: Mapping[str, Tensor], length: int, path: str | Path) -> int | None:
    """d, or ``None`` without a reduction; ``length`` is that of the pooled vector."""
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if d * (d + 1) // 2 != length:
        raise CheckpointError(
            f"{path} has no covariance pooling: its classifier takes {length} numbers, which is no d(d+1)/2; "
            "covpool.create_model(..., checkpoint_path=...) takes its backbone"
        )
    return d if f"{REDUCTION}weight" in tensors else None


def _weight(tensors: Mapping[str, Tensor], name: str, path: str | Path) -> Tensor:
    if name not in tensors or tensors[name].ndim != 2:
        raise CheckpointError(f"{path} has no classifier that covpool knows: {name} should be a matrix")
    return tensors[name]
