"""DropCov: in training, channels are dropped in the place of a root."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.functional.covariance import covariance, mean, triu_vec
from covpool.functional.numerics import at_least_float32, autocast_off, l2_normalized, reciprocal_or_zero
from covpool.nn.pooling.method import Method

KERNEL = 3
STRENGTH = 10


class DropCov(Method):
    r"""The covariance, in training of channels that are reweighted and dropped at random: d(d+1)/2 numbers.

    Q. Wang, M. Gao, Z. Zhang, J. Xie, P. Li, Q. Hu, "DropCov: A Simple yet Effective Method for Improving
    Deep Architectures", NeurIPS 2022. In training, with :math:`\mu_b` the mean over the positions of image b
    and k a learned kernel of three over the channels (ECA),

    .. math::
        \omega_b = \operatorname{softmax}(k * \mu_b), \qquad
        \tilde\Sigma_b = \operatorname{diag}(1 + \omega_b) \, \Sigma_b \operatorname{diag}(1 + \omega_b)

        \rho = \operatorname{clamp}\Big(1 - \frac{10}{\log_2 d} \cdot
            \operatorname*{mean}_b \cos(\omega_b, \tilde\Sigma_b \mathbf 1),\, 0,\, 1\Big), \qquad
        C_b = \frac{\operatorname{diag}(m_b) \, \tilde\Sigma_b \operatorname{diag}(m_b)}{(1 - \rho)^2}

    where :math:`m_{bc}` is 0 with probability :math:`\rho`, else 1: the covariance of features whose
    channels are multiplied by :math:`(1 + \omega) m / (1 - \rho)`. In evaluation :math:`C = \Sigma`, as in
    the authors' code: neither dropped nor reweighted.

    :math:`\rho` is one number a batch (of one process, where there are several) and a constant of the
    derivative: k learns by :math:`\tilde\Sigma` alone. Images whose covariance is zero or not finite have no
    say in it; at :math:`\rho = 1` the result is zero. The formula is made for wide features: of ReLU
    features of 64 channels and fewer it often gives 0, and nothing is dropped. The draws are of torch's own
    generator.

    Cost: that of the covariance. Zero eigenvalues stay zero; dropped channels add to them.
    """

    summary: ClassVar[str] = "the covariance, with adaptive channel dropout in training (DropCov)"

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.attention = nn.Conv1d(1, 1, KERNEL, padding=KERNEL // 2, bias=False)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x = at_least_float32(x)  # once: two float16 gradients would be added in float16
        sigma_BCC = covariance(x, weights=weights)
        if not self.training:
            return triu_vec(sigma_BCC)
        omega_BC = self._attention(mean(x, weights))
        sigma_BCC = rescaled(sigma_BCC, 1 + omega_BC)
        return triu_vec(rescaled(sigma_BCC, dropout_gains(omega_BC, drop_rate(omega_BC, sigma_BCC))))

    def _attention(self, mean_BC: Tensor) -> Tensor:
        kernel = self.attention.weight.to(mean_BC.dtype)
        with autocast_off(mean_BC):
            return F.conv1d(mean_BC.unsqueeze(1), kernel, padding=KERNEL // 2).squeeze(1).softmax(-1)

    def reset_parameters(self) -> None:
        """A new kernel."""
        self.attention.reset_parameters()


def rescaled(sigma_BCC: Tensor, gains_BC: Tensor) -> Tensor:
    """The covariance of features whose channels are multiplied by ``gains``."""
    return sigma_BCC * gains_BC.unsqueeze(-1) * gains_BC.unsqueeze(-2)


@torch.no_grad()
def drop_rate(omega_BC: Tensor, sigma_BCC: Tensor) -> Tensor:
    """ρ: the less the channels' weights go with their covariances, the more is dropped."""
    # One unit an image, so that no sum of a row overflows; the cosine has none.
    rows_BC = (sigma_BCC / sigma_BCC.shape[-1]).sum(-1)
    cosine_B = (l2_normalized(omega_BC) * l2_normalized(rows_BC)).sum(-1)
    counted_B = cosine_B.isfinite() & (rows_BC != 0).any(-1)
    mean_cosine = cosine_B.masked_fill(~counted_B, 0.0).sum() / counted_B.sum().clamp(min=1)
    # A single channel has no logarithm to divide by.
    strength = STRENGTH / math.log2(max(omega_BC.shape[-1], 2))
    return (1 - strength * mean_cosine).clamp(0, 1)


def dropout_gains(like_BC: Tensor, rate: Tensor) -> Tensor:
    """Zero with probability ``rate``, else 1/(1 − rate); all zero at a rate of 1."""
    kept_BC = torch.rand_like(like_BC) >= rate
    return kept_BC * reciprocal_or_zero(1 - rate)
