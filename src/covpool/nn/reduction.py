"""Fewer channels before the covariance, whose size grows with their square.

Shapes: x ``(B, C, *positions)``, weights ``(B, n)``, result ``(B, d, *positions)``.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.functional.arguments import check_choice
from covpool.functional.centring import normalized_weights
from covpool.functional.precision import at_least_float32, autocast_off

ReductionKind = Literal["auto", "convolution", "linear"]
REDUCTIONS = ("auto", "convolution", "linear")

# A feature at a position of weight zero that is this many times larger than every feature that counts
# is cut out before it meets a product: Inf and NaN would come out of it, and spread. (A whole number, for
# torch.compile takes a float of a module as an input of the graph.)
OUTLIER = 1000


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
            self.projection = nn.Conv2d(in_channels, dim, 1, bias=False)
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
        if weights is not None:
            x = without_outliers(x, weights)
        if self.norm is None or (self.kind == "auto" and x.ndim == 3):
            return self._linear(x)
        x_BCPQ = x.unsqueeze(2) if x.ndim == 3 else x.flatten(2, -2)
        y_BdPQ = self.projection(x_BCPQ)
        if weights is not None and self.norm.training:
            y_BdPQ = weighted_batch_norm(self.norm, y_BdPQ, weights)
        else:
            y_BdPQ = self.norm(y_BdPQ)
        return F.relu(y_BdPQ, inplace=True).reshape(x.shape[0], -1, *x.shape[2:])

    def _linear(self, x: Tensor) -> Tensor:
        weight = self.projection.weight.flatten(1)
        if self.norm is not None and torch.is_grad_enabled():
            # DistributedDataParallel waits for a gradient of every parameter: BatchNorm's get a zero.
            weight = weight + 0.0 * (self.norm.weight.sum() + self.norm.bias.sum())
        return F.linear(x.movedim(1, -1), weight).movedim(-1, 1)

    def extra_repr(self) -> str:
        """Kind alone: the children tell the rest."""
        return f"kind={self.kind!r}"


def without_outliers(x: Tensor, weights: Tensor) -> Tensor:
    """``x`` with zeros for what a mask hides: positions of weight zero may hold anything, NaN included.

    Under weights that are numbers, a feature of ordinary size stays, since the derivative with respect
    to its weight depends on it.
    """
    hidden = (weights == 0).reshape(x.shape[0], 1, *x.shape[2:])
    if weights.dtype == torch.bool:
        return x.masked_fill(hidden, 0.0)
    size = x.detach().abs()
    largest = size.masked_fill(hidden, 0.0).flatten(1).amax(1).reshape(-1, *(1,) * (x.ndim - 1))
    return x.masked_fill(hidden & ~(size <= OUTLIER * largest), 0.0)


def weighted_batch_norm(norm: nn.BatchNorm2d, x: Tensor, weights: Tensor) -> Tensor:
    r"""BatchNorm in training with every position counted by its weight.

    .. math::
        \mu = \tfrac1B \sum_{b,p} w_{bp} x_{bp}, \qquad
        \sigma^2 = \tfrac1B \sum_{b,p} w_{bp} (x_{bp} - \mu)^2, \qquad \sum_p w_{bp} = 1

    With equal weights it is BatchNorm itself. Images whose weights are all zero are not counted in B.
    """
    if type(norm) is not nn.BatchNorm2d:
        raise TypeError(
            f"weights in training need torch.nn.BatchNorm2d in the reduction; got {type(norm).__name__}: "
            'put it in eval mode, or make the layer with reduction="linear" or dim=None'
        )
    with autocast_off(x):
        x_BdPQ = at_least_float32(x)
        w_Bn = normalized_weights(weights, x_BdPQ.dtype)
        images = (w_Bn.sum(-1) > 0).sum()
        w_B1PQ = (w_Bn / images.clamp(min=1)).reshape(x.shape[0], 1, *x.shape[2:])
        mean_d11 = (x_BdPQ * w_B1PQ).sum((0, 2, 3)).reshape(-1, 1, 1)
        centred_BdPQ = x_BdPQ - mean_d11
        variance_d11 = (centred_BdPQ * w_B1PQ * centred_BdPQ).sum((0, 2, 3)).reshape(-1, 1, 1)
        _update_running(norm, mean_d11.flatten(), variance_d11.flatten(), images, (w_Bn > 0).sum())
        scale_d11 = norm.weight.reshape(-1, 1, 1) * (variance_d11 + norm.eps).rsqrt()
        return torch.addcmul(norm.bias.reshape(-1, 1, 1), centred_BdPQ, scale_d11).to(x.dtype)


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
