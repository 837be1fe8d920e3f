"""The classifier as one linear function of the pooled vector, where it is one: what exact maps need.

The logit of class k is ``⟨w_k, v⟩ + b_k`` for the vector v that the method gives. A BatchNorm behind the root
folds into both, a low rank multiplies out, and normalisation to length one divides by the length that the
image's own vector has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from covpool.functional.triu import triu_unvec
from covpool.models.head import Head
from covpool.models.model import PooledClassifier
from covpool.nn.pooling.isqrt_cov import IsqrtCov


@dataclass(frozen=True, eq=False)
class LinearHead:
    """Of one image.

    Attributes:
        weights: ``(classes, D)``, of the method's own vector.
        bias: ``(classes,)``, all of the logit that no place adds.
    """

    weights: Tensor
    bias: Tensor


def is_linear(head: Head) -> bool:
    """Whether logits are a linear function of the vector, up to its length."""
    return all(isinstance(layer, nn.Linear) for layer in head.hidden) and isinstance(
        head.classifier, nn.Linear
    )


def linear_head(model: PooledClassifier, raw: Tensor, classes: Tensor) -> LinearHead:
    """For one image, whose vector straight from the method, before a BatchNorm, is ``raw``, ``(D,)``."""
    assert isinstance(model.head.classifier, nn.Linear)
    weights = model.head.classifier.weight[classes].to(raw.dtype)
    bias = model.head.classifier.bias[classes].to(raw.dtype)
    scale, shift = _folded(model.pool.pooling, raw)
    pooled = raw * scale + shift
    for layer in reversed(model.head.hidden):
        assert isinstance(layer, nn.Linear)
        weights = weights @ layer.weight.to(raw.dtype)
    if model.head.normalize is not None:
        received = pooled
        for layer in model.head.hidden:
            received = layer.weight.to(raw.dtype) @ received  # type: ignore[operator]
        weights = weights / received.norm().clamp_min(1e-12)  # torch's own normalize has this floor
    return LinearHead(weights * scale, bias + weights @ shift)


def symmetric(weights: Tensor) -> Tensor:
    """``(classes, d(d+1)/2)`` of an upper triangle to symmetric ``(classes, d, d)`` with ⟨W, C⟩ = ⟨w, v⟩."""
    matrix = triu_unvec(weights)
    return (matrix + torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))) / 2


def _folded(method: object, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm in evaluation, or 1 and 0."""
    if not isinstance(method, IsqrtCov) or method.norm is None:
        return torch.ones_like(raw), torch.zeros_like(raw)
    norm = method.norm
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return scale.to(raw.dtype), (norm.bias - norm.running_mean * scale).to(raw.dtype)
