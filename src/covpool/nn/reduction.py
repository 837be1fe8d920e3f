"""Reduce the number of channels before the covariance, whose size grows with their square.

Shapes: x ``(B, C, *positions)``, weights ``(B, n)`` with n positions, result ``(B, d, *positions)``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.errors import UsageTypeError
from covpool.functional.arguments import check_choice
from covpool.functional.centering import normalized_weights, without_outliers
from covpool.functional.differentiable import at_least_float32

ReductionKind = Literal["convolution", "linear"]
REDUCTIONS = ("convolution", "linear")
# The paper's d: channels after the reduction.
DIM = 256


class Reduction(nn.Module):
    r"""Project C channels to d at every position.

    Args:
        in_channels: C.
        dim: d.
        kind: ``"convolution"``, the paper's: a 1x1 convolution without bias, BatchNorm and ReLU, for maps.
            ``"linear"``: :math:`W x_p` alone, for tokens. It keeps the signs that a transformer's last
            LayerNorm leaves. It has no bias, because the covariance would remove it.

    Shapes:
        ``(B, C, *positions)`` to ``(B, d, *positions)``. Channels-last memory stays channels-last.

    The convolution starts as Kaiming normal (fan out), like the authors' code. The linear map starts as a
    normal of variance 1/C, which keeps the scale of the features, because no BatchNorm follows it.

    Early versions of covpool chose the kind at each call. Their state dicts load into ``"linear"`` if the
    layer pooled tokens, and into ``"convolution"`` if it pooled maps.

    Example:
        >>> Reduction(2048, 256, "convolution")(torch.randn(2, 2048, 7, 7)).shape
        torch.Size([2, 256, 7, 7])
    """

    def __init__(self, in_channels: int, dim: int, kind: ReductionKind) -> None:
        super().__init__()
        check_choice("reduction", kind, REDUCTIONS)
        self.kind = kind
        self.projection: nn.Conv2d | nn.Linear
        if kind == "linear":
            self.projection = nn.Linear(in_channels, dim, bias=False)
            self.norm = None
        else:
            self.projection = PointwiseConv2d(in_channels, dim, 1, bias=False)
            self.norm = nn.BatchNorm2d(dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights and reset BatchNorm."""
        weight = self.projection.weight
        if self.norm is None:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        else:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
            self.norm.reset_parameters()

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Reduce. Positions of weight zero have no effect, not even on BatchNorm's statistics."""
        x_BCn = x.flatten(2)
        if weights is not None:
            x_BCn = without_outliers(x_BCn, weights)
        if self.norm is None:
            y_Bdn = self.projection(x_BCn.mT).mT
        else:
            y_Bdn = self.projection(x_BCn.unsqueeze(2)).squeeze(2)
            y_Bdn = F.relu(_normalize(y_Bdn, self.norm, weights), inplace=True)
        result: Tensor = y_Bdn.unflatten(2, x.shape[2:])
        return result

    def extra_repr(self) -> str:
        """Return the kind; the child modules print the rest."""
        return f"kind={self.kind!r}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        if self.kind == "linear":
            drop_unused_norm(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def drop_unused_norm(state: dict[str, Tensor], prefix: str) -> None:
    """Turn the state of an early version's reduction that pooled tokens into the state of ``"linear"``.

    The early layer had a convolution's weight and a BatchNorm that tokens bypassed. A BatchNorm that was
    trained belongs to maps: its state is left as it is, and loading it reports the unexpected keys.
    """
    weight, bias = f"{prefix}projection.weight", f"{prefix}norm.bias"
    batches = f"{prefix}norm.num_batches_tracked"
    if not {weight, bias, batches} <= state.keys() or state[batches].any() or state[bias].any():
        return
    state[weight] = state[weight].flatten(1)
    for name in [name for name in state if name.startswith(f"{prefix}norm.")]:
        del state[name]


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution as one matrix product that keeps the memory layout.

    It works on three dimensions: inductor fails on the 4-D views that torch's convolution saves for backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(B, C, H, W)`` to ``(B, d, H, W)``."""
        x_BCn, weight_dC = input.flatten(2), self.weight.flatten(1)
        if x_BCn.stride(1) == 1:
            y_Bdn = F.linear(x_BCn.mT, weight_dC).mT
        else:
            y_Bdn = F.conv1d(x_BCn, weight_dC.unsqueeze(2))
        result: Tensor = y_Bdn.unflatten(2, input.shape[2:])
        return result


def _normalize(y_Bdn: Tensor, norm: nn.BatchNorm2d, weights: Tensor | None) -> Tensor:
    if weights is not None and norm.training:
        return weighted_batch_norm(norm, y_Bdn, weights)
    normalized: Tensor = norm(y_Bdn.unsqueeze(2))
    return normalized.squeeze(2)


def weighted_batch_norm(norm: nn.BatchNorm2d, x: Tensor, weights: Tensor) -> Tensor:
    r"""Apply BatchNorm in training mode, counting every position by its weight.

    .. math::
        \mu = \tfrac1B \sum_{b,p} w_{bp} x_{bp}, \qquad
        \sigma^2 = \tfrac1B \sum_{b,p} w_{bp} (x_{bp} - \mu)^2, \qquad \sum_p w_{bp} = 1

    Equal weights give ordinary BatchNorm. Images whose weights are all zero do not count in B.
    """
    if type(norm) is not nn.BatchNorm2d:
        raise UsageTypeError(
            f"weights in training need torch.nn.BatchNorm2d in the reduction; got {type(norm).__name__}: "
            'put it in eval mode, or create the layer with reduction="linear" or dim=None'
        )
    x_Bdn = at_least_float32(x)
    w_Bn = normalized_weights(weights, x_Bdn.dtype)
    images = (w_Bn.sum(-1) > 0).sum()
    w_B1n = (w_Bn / images.clamp(min=1)).unsqueeze(1)
    mean_d1 = (x_Bdn * w_B1n).sum((0, 2)).unsqueeze(1)
    centered_Bdn = x_Bdn - mean_d1
    variance_d1 = (centered_Bdn * w_B1n * centered_Bdn).sum((0, 2)).unsqueeze(1)
    _update_running(norm, mean_d1.squeeze(1), variance_d1.squeeze(1), images, (w_Bn > 0).sum())
    scale_d1 = norm.weight.unsqueeze(1) * (variance_d1 + norm.eps).rsqrt()
    return (norm.bias.unsqueeze(1) + centered_Bdn * scale_d1).to(x.dtype)


@torch.no_grad()
def _update_running(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, images: Tensor, n: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    seen = (images > 0).to(mean.dtype)  # a batch that is fully masked changes nothing
    norm.num_batches_tracked.add_(seen.to(torch.long))
    rate = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.clamp(min=1)
    unbiased = variance * (n / (n - 1).clamp(min=1))
    norm.running_mean.add_((mean - norm.running_mean) * (seen * rate))
    norm.running_var.add_((unbiased - norm.running_var) * (seen * rate))
