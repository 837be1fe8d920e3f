"""The paper's networks written out from its text, for weights with the authors' names: an oracle.

It uses neither covpool nor timm. Weights are a dict, and layers are functions of torch. The covariance, its
root and its upper triangle follow the paper's equations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.functional import paper

Weights = dict[str, Tensor]

R50, R101, R152 = (3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)
# VGG-D: convolution widths, and M for max pooling. The last pooling is the one that the paper drops.
VGG_D: tuple[int | str, ...] = (
    *(64, 64, "M", 128, 128, "M"),
    *(256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512),
)


def resnet_weights(blocks: Sequence[int], *, classes: int, dim: int) -> Weights:
    """Return random weights of a bottleneck ResNet, named as in the authors' released files."""
    weights = _convolution("conv1", 3, 64, 7) | _batchnorm("bn1", 64)
    before = 64
    for stage, count in enumerate(blocks, start=1):
        width = 64 * 2 ** (stage - 1)
        for block in range(count):
            weights |= _bottleneck(f"layer{stage}.{block}", before, width)
            before = 4 * width
    weights |= _convolution("layer_reduce", before, dim, 1) | _batchnorm("layer_reduce_bn", dim)
    return weights | _dense("fc", dim * (dim + 1) // 2, classes)


def vgg_weights(*, classes: int, dim: int, hidden: int) -> Weights:
    """Return random weights of VGG-D with BatchNorm, named as in the authors' training code."""
    weights: Weights = {}
    before, layer = 3, 0
    for width in VGG_D:
        if not isinstance(width, int):
            layer += 1
            continue
        weights |= _convolution(f"features.{layer}", before, width, 3, bias=True)
        weights |= _batchnorm(f"features.{layer + 1}", width)
        before, layer = width, layer + 3
    weights |= _convolution("representation.conv_dr_block.0", before, dim, 1)
    weights |= _batchnorm("representation.conv_dr_block.1", dim)
    weights |= _dense("classifier.0", dim * (dim + 1) // 2, hidden) | _dense("classifier.3", hidden, hidden)
    return weights | _dense("classifier.6", hidden, classes)


def resnet_logits(weights: Weights, images: Tensor, *, steps: int = 5, last_stride: int = 1) -> Tensor:
    """Compute ResNet logits from released names. In section 4.1 the last stage has stride 1."""
    x = F.conv2d(images, weights["conv1.weight"], stride=2, padding=3)
    x = F.max_pool2d(F.relu(_normalize(x, weights, "bn1")), 3, 2, 1)
    for stage, stride in zip((1, 2, 3, 4), (1, 2, 2, last_stride), strict=True):
        block = 0
        while f"layer{stage}.{block}.conv1.weight" in weights:
            x = _bottleneck_forward(x, weights, f"layer{stage}.{block}", stride if block == 0 else 1)
            block += 1
    x = F.relu(_normalize(F.conv2d(x, weights["layer_reduce.weight"]), weights, "layer_reduce_bn"))
    return _linear(second_order(x, steps), weights, "fc")


def vgg_logits(weights: Weights, images: Tensor) -> Tensor:
    """Compute VGG logits from weights with the names of the training code."""
    x, layer = images, 0
    for width in VGG_D:
        if width == "M":
            x, layer = F.max_pool2d(x, 2), layer + 1
            continue
        x = F.conv2d(x, weights[f"features.{layer}.weight"], weights[f"features.{layer}.bias"], padding=1)
        x, layer = F.relu(_normalize(x, weights, f"features.{layer + 1}")), layer + 3
    if "representation.conv_dr_block.0.weight" in weights:
        x = F.conv2d(x, weights["representation.conv_dr_block.0.weight"])
        x = F.relu(_normalize(x, weights, "representation.conv_dr_block.1"))
    x = second_order(x)
    if "classifier.weight" in weights:  # fine-tuning removes the hidden layers
        return _linear(x, weights, "classifier")
    for layer in (0, 3):
        x = F.relu(_linear(x, weights, f"classifier.{layer}"))
    return _linear(x, weights, "classifier.6")


def alexnet_logits(weights: Weights, images: Tensor) -> Tensor:
    """Compute AlexNet logits, ``conv1`` to ``fc8``, with BatchNorm after every layer but the last."""
    x = images
    for layer, (stride, padding) in enumerate(((4, 2), (1, 2), (1, 1), (1, 1), (1, 1)), start=1):
        x = F.conv2d(x, weights[f"conv{layer}.weight"], stride=stride, padding=padding)
        x = F.relu(_normalize(x, weights, f"bn{layer}"))
        if layer in (1, 2):  # the pooling after conv5 is dropped
            x = F.max_pool2d(x, 3, 2)
    x = second_order(x)
    for layer in (6, 7):
        x = F.relu(_normalize(F.linear(x, weights[f"fc{layer}.weight"]), weights, f"bn{layer}"))
    return _linear(x, weights, "fc8")


def second_order(x: Tensor, steps: int = 5) -> Tensor:
    """Map ``(B, d, H, W)`` to the upper triangle, row by row, of the root of the covariance."""
    c = paper.isqrt_cov(x.flatten(2), steps)
    rows, columns = torch.triu_indices(c.shape[-1], c.shape[-1])
    return c[:, rows, columns]


def as_trained(released: Weights, *, from_scratch: bool) -> Weights:
    """Rename the weights of a ResNet as the authors' training code names them."""
    reduction = ("representation.conv_dr_block.0.", "representation.conv_dr_block.1.")
    prefixes = {
        "conv1.": "features.0.",
        "bn1.": "features.1.",
        "layer1.": "features.4.",
        "layer2.": "features.5.",
        "layer3.": "features.6.",
        "layer4.": "features.7.",
        "layer_reduce.": reduction[0] if from_scratch else "features.8.",
        "layer_reduce_bn.": reduction[1] if from_scratch else "features.9.",
        "fc.": "classifier.",
    }
    return renamed(released, prefixes)


def renamed(weights: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> Weights:
    """Replace prefixes. Every name must have exactly one of the old prefixes."""
    result: Weights = {}
    for name, tensor in weights.items():
        (old,) = (prefix for prefix in prefixes if name.startswith(prefix))
        result[prefixes[old] + name.removeprefix(old)] = tensor
    return result


def randomize_batchnorm(state: Mapping[str, Tensor]) -> None:
    """Give the BatchNorms of a new network different statistics and scales, so that a mix-up is detected."""
    for name, tensor in state.items():
        if name.endswith("running_mean"):
            stem = name.removesuffix(".running_mean")
            for key, value in _batchnorm(stem, len(tensor)).items():
                state[key].copy_(value)


def _bottleneck(name: str, before: int, width: int) -> Weights:
    after = 4 * width
    weights = _convolution(f"{name}.conv1", before, width, 1) | _batchnorm(f"{name}.bn1", width)
    weights |= _convolution(f"{name}.conv2", width, width, 3) | _batchnorm(f"{name}.bn2", width)
    weights |= _convolution(f"{name}.conv3", width, after, 1) | _batchnorm(f"{name}.bn3", after, scale=0.25)
    if name.endswith(".0"):
        weights |= _convolution(f"{name}.downsample.0", before, after, 1)
        weights |= _batchnorm(f"{name}.downsample.1", after)
    return weights


def _bottleneck_forward(x: Tensor, weights: Weights, name: str, stride: int) -> Tensor:
    y = F.relu(_normalize(F.conv2d(x, weights[f"{name}.conv1.weight"]), weights, f"{name}.bn1"))
    y = F.conv2d(y, weights[f"{name}.conv2.weight"], stride=stride, padding=1)
    y = F.relu(_normalize(y, weights, f"{name}.bn2"))
    y = _normalize(F.conv2d(y, weights[f"{name}.conv3.weight"]), weights, f"{name}.bn3")
    if f"{name}.downsample.0.weight" in weights:
        x = F.conv2d(x, weights[f"{name}.downsample.0.weight"], stride=stride)
        x = _normalize(x, weights, f"{name}.downsample.1")
    return F.relu(y + x)


def _convolution(name: str, before: int, after: int, side: int, bias: bool = False) -> Weights:
    weight = torch.randn(after, before, side, side) * (2 / (before * side * side)) ** 0.5
    return {f"{name}.weight": weight} | ({f"{name}.bias": 0.1 * torch.randn(after)} if bias else {})


def _batchnorm(name: str, channels: int, scale: float = 1.0) -> Weights:
    return {
        f"{name}.weight": scale
        * (0.5 + torch.rand(channels)),  # a small scale keeps deep residual sums bounded
        f"{name}.bias": 0.1 * torch.randn(channels),
        f"{name}.running_mean": 0.1 * torch.randn(channels),
        f"{name}.running_var": 0.5 + torch.rand(channels),
        f"{name}.num_batches_tracked": torch.tensor(7),
    }


def _dense(name: str, before: int, after: int) -> Weights:
    return {f"{name}.weight": torch.randn(after, before) * before**-0.5, f"{name}.bias": torch.randn(after)}


def _normalize(x: Tensor, weights: Weights, name: str) -> Tensor:
    mean, variance = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
    return F.batch_norm(x, mean, variance, weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-5)


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
