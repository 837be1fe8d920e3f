"""Moment Probing: cross-covariances between heads of projected features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.arguments import check_whole
from covpool.errors import UsageError
from covpool.functional.covariance import center, without_outliers
from covpool.functional.numerics import at_least_float32, autocast_off, l2_normalized
from covpool.nn.pooling.method import Method

KERNEL, STRIDE = 3, 2
SMALLEST_HEAD = 7  # what two convolutions leave one number of


@dataclass(frozen=True)
class MomentProbingOptions:
    """The size of the projected features.

    Attributes:
        width: channels after the projection.
        heads: number of groups that the channels are split into.
    """

    width: int = 512
    heads: int = 4

    def __post_init__(self) -> None:
        check_whole("heads", self.heads, at_least=2)
        check_whole("width", self.width)
        if self.width % self.heads or self.width < SMALLEST_HEAD * self.heads:
            raise UsageError(
                f"width must be a multiple of heads, {SMALLEST_HEAD} times it at least; "
                f"got width={self.width}, heads={self.heads}"
            )


class MomentProbing(Method):
    r"""Cross-covariances of neighboring heads, made smaller by two convolutions: (heads − 1)·s² numbers.

    M. Gao, Q. Wang, Z. Lin, P. Zhu, Q. Hu, J. Zhou, "Tuning Pre-trained Model via Moment Probing",
    ICCV 2023: its multi-head convolutional cross-covariance. With :math:`Z_1 \dots Z_h` the heads, each
    w×n with w = width/heads, and :math:`\bar Z` a head less its mean over positions,

    .. math::
        [Z_1; \dots; Z_h] = \operatorname{LayerNorm}_{\text{a head}}(W X + b), \qquad
        K_i = \operatorname{columns}\big(\tfrac1n \bar Z_i \bar Z_{i+1}^T\big), \qquad
        y = V' * \operatorname{GELU}(V * [K_1 \dots K_{h-1}])

    where ``columns`` makes every column of unit length (zero stays zero), all heads share one LayerNorm,
    and V and V' are 3×3 convolutions of stride 2 over the heads − 1 matrices, without padding or bias: s is
    w halved twice, 31 of 128, and the result has 2883 numbers with the default options.

    It has its own projection: create the layer with ``dim=None``, or it projects the reduced features again.
    The paper averages its logits with those of the class token (or of the mean); that belongs to the
    classifier, not to the pooling.

    Cost: one product of width×d by d×n, heads − 1 of w×n by n×w, and the convolutions; twice that backward.
    A matrix of two different heads has no eigenvalues to speak of; directions without variance stay zero.
    """

    summary: ClassVar[str] = (
        "covariances between groups of projected channels, then two convolutions (Moment Probing)"
    )
    reduces: ClassVar[bool] = True
    Options: ClassVar[type[MomentProbingOptions]] = MomentProbingOptions
    options: MomentProbingOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        pairs = self.options.heads - 1
        self.projection = nn.Linear(channels, self.options.width)
        self.norm = nn.LayerNorm(self.options.width // self.options.heads)
        self.first = nn.Conv2d(pairs, pairs, KERNEL, STRIDE, bias=False)
        self.second = nn.Conv2d(pairs, pairs, KERNEL, STRIDE, bias=False)

    @property
    def out_features(self) -> int:
        """What the convolutions leave of heads − 1 matrices."""
        side = self.options.width // self.options.heads
        for _ in range(2):
            side = (side - KERNEL) // STRIDE + 1
        return (self.options.heads - 1) * side**2

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x_BCn = without_outliers(at_least_float32(x), weights)
        with autocast_off(x_BCn):
            k_BPww = cross_covariances(self._heads(x_BCn), weights, self.options.heads)
            y_BPss = F.conv2d(k_BPww, self.first.weight.to(k_BPww.dtype), stride=STRIDE)
            y_BPss = F.conv2d(F.gelu(y_BPss), self.second.weight.to(k_BPww.dtype), stride=STRIDE)
            return y_BPss.flatten(1)

    def _heads(self, x_BCn: Tensor) -> Tensor:
        """Projected, and normalized head by head, ``(B, width, n)``, in x's dtype whatever the layer's."""
        projection, norm, dtype = self.projection, self.norm, x_BCn.dtype
        z_Bnd = F.linear(x_BCn.mT, projection.weight.to(dtype), projection.bias.to(dtype))
        z_Bnhw = z_Bnd.unflatten(-1, (self.options.heads, -1))
        z_Bnhw = F.layer_norm(
            z_Bnhw, norm.normalized_shape, norm.weight.to(dtype), norm.bias.to(dtype), norm.eps
        )
        return z_Bnhw.flatten(2).mT

    def reset_parameters(self) -> None:
        """All parameters as new."""
        for module in (self.projection, self.norm, self.first, self.second):
            module.reset_parameters()


def cross_covariances(z_Bdn: Tensor, weights_Bn: Tensor | None, heads: int) -> Tensor:
    """Return cross-covariances of neighboring heads with unit-length columns, ``(B, heads − 1, w, w)``."""
    # Divided by a number of the image that the columns' lengths undo.
    m_Bdn, _ = center(z_Bdn, weights_Bn)
    m_Bhwn = m_Bdn.unflatten(1, (heads, -1))
    transposed_BPww = torch.matmul(m_Bhwn[:, 1:], m_Bhwn[:, :-1].mT)
    return l2_normalized(transposed_BPww).mT
