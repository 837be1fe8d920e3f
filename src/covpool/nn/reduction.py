"""Fewer channels before the covariance, whose size grows with their square.

Shapes: x ``(B, C, *positions)`` or ``(B, C, n)``, weights ``(B, n)``, result with d channels for C.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.errors import UsageTypeError
from covpool.functional.arguments import check_choice
from covpool.functional.centring import normalized_weights, without_outliers
from covpool.functional.differentiable import at_least_float32

ReductionKind = Literal["auto", "convolution", "linear"]
REDUCTIONS = ("auto", "convolution", "linear")


class Reduction(nn.Module):
    r"""From C channels to d, at every position alone.

    For maps, the paper's: a 1x1 convolution without bias, BatchNorm and ReLU. For tokens,
    :math:`W x_p` alone, which keeps the signed geometry a transformer's last LayerNorm leaves. It has
    no bias, for the covariance would take it away again.

    Args:
        in_channels: C.
        dim: d.
        kind: ``"convolution"`` or ``"linear"`` whatever the input; ``"auto"`` is linear for 3-D
            input and a convolution for maps, with the same W. Say which one when it is known: then
            no parameter is made in vain.

    Shapes:
        ``(B, C, *positions)`` to ``(B, d, *positions)``. Memory laid out with the channels last stays so.

    The weight starts as Kaiming normal (fan out), as the authors' does; with ``kind="linear"``, where
    no BatchNorm follows, as a normal of variance 1/C, which keeps the scale of the features.

    Example:
        >>> Reduction(2048, 256)(torch.randn(2, 2048, 7, 7)).shape
        torch.Size([2, 256, 7, 7])
    """

    def __init__(self, in_channels: int, dim: int, kind: ReductionKind = "auto") -> None:
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
        """Start again: new weights, BatchNorm as new."""
        weight = self.projection.weight
        if self.norm is None:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        else:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
            self.norm.reset_parameters()

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Reduce. Positions of weight zero have no say, not even in BatchNorm's statistics."""
        x_BCn = x.flatten(2)
        if weights is not None:
            x_BCn = without_outliers(x_BCn, weights)
        if self.norm is None:
            y_Bdn = self.projection(x_BCn.mT).mT
        else:
            y_Bdn = self.projection(x_BCn.unsqueeze(2)).squeeze(2)
            if self.kind == "auto" and x.ndim == 3:
                y_Bdn = _with_idle_parameters(y_Bdn, self.norm)
            else:
                y_Bdn = F.relu(_normalize(y_Bdn, self.norm, weights), inplace=True)
        result: Tensor = y_Bdn.unflatten(2, x.shape[2:])
        return result

    def extra_repr(self) -> str:
        """Kind alone: the children tell the rest."""
        return f"kind={self.kind!r}"


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution as one product, with memory left in the order it has.

    The product is of three dimensions: inductor fails on the views of four that torch's own
    convolution would have to keep for its gradient.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, d, H, W)``."""
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


def _with_idle_parameters(y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """``y``; DistributedDataParallel waits for a gradient of every parameter: these get a zero."""
    if not torch.is_grad_enabled():
        return y
    return y + 0.0 * (norm.weight.sum() + norm.bias.sum()).to(y.dtype)


def weighted_batch_norm(norm: nn.BatchNorm2d, x: Tensor, weights: Tensor) -> Tensor:
    r"""BatchNorm in training with every position counted by its weight.

    .. math::
        \mu = \tfrac1B \sum_{b,p} w_{bp} x_{bp}, \qquad
        \sigma^2 = \tfrac1B \sum_{b,p} w_{bp} (x_{bp} - \mu)^2, \qquad \sum_p w_{bp} = 1

    With equal weights it is BatchNorm itself. Images whose weights are all zero are not counted in B.
    """
    if type(norm) is not nn.BatchNorm2d:
        raise UsageTypeError(
            f"weights in training need torch.nn.BatchNorm2d in the reduction; got {type(norm).__name__}: "
            'put it in eval mode, or make the layer with reduction="linear" or dim=None'
        )
    x_Bdn = at_least_float32(x)
    w_Bn = normalized_weights(weights, x_Bdn.dtype)
    images = (w_Bn.sum(-1) > 0).sum()
    w_B1n = (w_Bn / images.clamp(min=1)).unsqueeze(1)
    mean_d1 = (x_Bdn * w_B1n).sum((0, 2)).unsqueeze(1)
    centred_Bdn = x_Bdn - mean_d1
    variance_d1 = (centred_Bdn * w_B1n * centred_Bdn).sum((0, 2)).unsqueeze(1)
    _update_running(norm, mean_d1.squeeze(1), variance_d1.squeeze(1), images, (w_Bn > 0).sum())
    scale_d1 = norm.weight.unsqueeze(1) * (variance_d1 + norm.eps).rsqrt()
    return (norm.bias.unsqueeze(1) + centred_Bdn * scale_d1).to(x.dtype)


@torch.no_grad()
def _update_running(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, images: Tensor, n: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    seen = (images > 0).to(mean.dtype)  # a batch that is masked altogether leaves no trace
    norm.num_batches_tracked.add_(seen.to(torch.long))
    rate = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.clamp(min=1)
    unbiased = variance * (n / (n - 1).clamp(min=1))
    norm.running_mean.add_((mean - norm.running_mean) * (seen * rate))
    norm.running_var.add_((unbiased - norm.running_var) * (seen * rate))
