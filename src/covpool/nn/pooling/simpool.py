"""SimPool: attention whose query is the average of the image itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.arguments import check_positive
from covpool.functional.attention import attended, attention
from covpool.functional.covariance import mean, without_outliers
from covpool.functional.numerics import at_least_float32, autocast_off
from covpool.nn.pooling.gem import power_or_zero
from covpool.nn.pooling.method import Method

EPS = 1e-6


@dataclass(frozen=True)
class SimpoolOptions:
    """The exponent of the generalized mean.

    Attributes:
        gamma: exponent; the paper uses 2 for convolutional networks and 1.25 for transformers.
    """

    gamma: float = 2.0

    def __post_init__(self) -> None:
        check_positive("gamma", self.gamma)


class Simpool(Method):
    r"""SimPool: the average of an image attends to its positions; a generalized mean pools them, d values.

    B. Psomas, I. Kakogeorgiou, K. Karantzalos, Y. Avrithis, "Keep It SimPool: Who Said Supervised
    Transformers Suffer from Attention Deficit?", ICCV 2023. With :math:`\mu` the mean over positions,
    :math:`z_p` the features after a learned LayerNorm, and Q and K projections,

    .. math::
        a_p = \operatorname{softmax}_p \Big(\frac{(Q \mu)^T K z_p}{\sqrt d}\Big), \qquad
        v_{cp} = z_{cp} - \min_{k, r} z_{kr} + \epsilon, \qquad
        y_c = \Big(\sum_p a_p v_{cp}^\gamma\Big)^{1/\gamma}

    with :math:`\epsilon` = 1e-6. The minimum is that of the image; the authors' code uses that of the batch,
    which lets images affect each other. The key projection is applied to the query,
    :math:`K^T Q \mu`, so the cost is 2·d² products per image instead of d²·n.

    Only positions of positive weight count in the minimum, so the result jumps where the weight of the
    smallest feature becomes zero.
    """

    summary: ClassVar[str] = "attention of the image's own average, generalized mean (SimPool)"
    order: ClassVar[int] = 1
    Options: ClassVar[type[SimpoolOptions]] = SimpoolOptions
    options: SimpoolOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.norm = nn.LayerNorm(channels, eps=EPS)
        self.query = nn.Linear(channels, channels, bias=False)
        self.key = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x_BCn = without_outliers(at_least_float32(x), weights)
        dtype, gamma = x_BCn.dtype, self.options.gamma
        with autocast_off(x_BCn):
            norm = self.norm
            z_BCn = F.layer_norm(
                x_BCn.mT, norm.normalized_shape, norm.weight.to(dtype), norm.bias.to(dtype), norm.eps
            ).mT
            query_BC = F.linear(mean(x_BCn, weights), self.query.weight.to(dtype))
            query_BC = torch.matmul(query_BC, self.key.weight.to(dtype)) * self.channels**-0.5
            attention_B1n = attention(torch.bmm(query_BC.unsqueeze(1), z_BCn), weights)
            powers_BCn = power_or_zero(z_BCn - lowest(z_BCn, weights) + EPS, gamma)
            return power_or_zero(attended(powers_BCn, attention_B1n, None, self.channels), 1 / gamma)

    def reset_parameters(self) -> None:
        """Reset the LayerNorm and draw new projections."""
        for module in (self.norm, self.query, self.key):
            module.reset_parameters()


def lowest(z_BCn: Tensor, weights: Tensor | None) -> Tensor:
    """Return the smallest feature of each image at positions that count, ``(B, 1, 1)``; 0 if none counts."""
    if weights is None:
        return z_BCn.amin((1, 2), keepdim=True)
    hidden_B1n = (weights == 0).unsqueeze(1)
    smallest_B11 = z_BCn.masked_fill(hidden_B1n, torch.inf).amin((1, 2), keepdim=True)
    return smallest_B11.masked_fill(hidden_B1n.all(-1, keepdim=True), 0.0)
