r"""Factor a pooled matrix over positions: :math:`C = M K M^T`, with a column of M for each position.

A method whose matrix is a function of the covariance has this form: :math:`f(\Sigma) = M\,g(M^TM)\,M^T` for
centered features M. K weights each pair of positions; with :math:`L = M K`,

.. math::  \langle W, C \rangle = \sum_p m_p^T W \, l_p ,

a sum over positions. L can be computed from either side of the features, n×n or C×C, as in
:mod:`covpool.functional.isqrt_sides`: :math:`M\,Z(M^TM) = Z(MM^T)\,M`.

Letters: B images, C channels, n positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from covpool.errors import UsageError
from covpool.functional import isqrt_sides as sides
from covpool.functional.centering import center
from covpool.functional.eigen import spectrum
from covpool.functional.isqrt_cov import cheaper_side
from covpool.functional.newton_schulz import newton_schulz
from covpool.functional.normalization import Compensation, norm_of, reciprocal_or_zero
from covpool.nn.pooling.isqrt_cov import IsqrtCov
from covpool.nn.pooling.method import Cov, Method
from covpool.nn.pooling.spectral import MpnCov, post_normalized

Side = Literal["auto", "channels", "positions"]
EXACT = (Cov, IsqrtCov, MpnCov)


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors of a batch.

    Attributes:
        m: M, ``(B, C, n)``.
        l: L = M K, ``(B, C, n)``.
        k: K, ``(B, n, n)``; ``None`` if L was computed from the channels.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    k: Tensor | None

    def matrix(self) -> Tensor:
        """Return C, ``(B, C, C)``."""
        c = torch.bmm(self.l, self.m.mT)
        return (c + c.mT) / 2

    def places(self, w: Tensor) -> Tensor:
        """Return the contribution of each position to ⟨W, C⟩, for symmetric W ``(C, C)``: ``(B, n)``."""
        return ((w @ self.m) * self.l).sum(1)

    def pairs(self, w: Tensor) -> Tensor:
        """Return the contribution of each pair, ``(B, n, n)``; its rows sum to :meth:`places`."""
        if self.k is None:
            raise UsageError('pairs of positions need K: compute the factors with side="positions"')
        return torch.bmm(self.m.mT, w @ self.m) * self.k


def factors(method: Method, x: Tensor, side: Side = "auto") -> Factors:
    """Return the factors of a method in ``EXACT``.

    Args:
        method: the pooling method.
        x: its input, ``(B, C, n)``.
        side: ``"positions"`` with K, ``"channels"`` without K, ``"auto"`` for the cheaper one.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    m, s = center(x, None)
    if isinstance(method, IsqrtCov):
        return _iterated(m, s, method, side)
    if isinstance(method, Cov):
        variance = s * s
        return Factors(m, m * variance, variance * torch.eye(x.shape[2], dtype=x.dtype, device=x.device))
    assert isinstance(method, MpnCov)
    return _decomposed(m * s, method)


def _iterated(m: Tensor, s: Tensor, method: IsqrtCov, side: Side) -> Factors:
    options = method.options
    if side == "auto":
        side = cheaper_side(m.shape[1], m.shape[2], options.steps)
    compensation: Compensation = "matched" if options.compensation == "matched" else "none"
    if side == "positions":
        chosen = sides.Options(options.steps, options.normalization, compensation, True, m.dtype)
        kernel = sides.value(m, s, chosen).kernel
        return Factors(m, torch.bmm(m, kernel), kernel)
    gram = torch.bmm(m, m.mT)
    t = norm_of(gram, options.normalization)
    inverse, _ = newton_schulz(gram * reciprocal_or_zero(t), options.steps, inverse=True)
    factor = (t.sqrt() * s if compensation == "matched" else torch.ones_like(t)) * reciprocal_or_zero(t)
    return Factors(m, torch.bmm(inverse, m) * factor, None)


def _decomposed(m: Tensor, method: MpnCov) -> Factors:
    """For a power α of the eigenvalues, K has those of MᵀM to the power α - 1, and keeps zeros."""
    found = spectrum(torch.bmm(m.mT, m))
    zero = found.values <= 0
    powers = found.values.masked_fill(zero, 1.0).pow(method.options.power - 1).masked_fill(zero, 0.0)
    kernel = found.assemble(powers)
    c = torch.bmm(torch.bmm(m, kernel), m.mT)
    scaled = post_normalized(c, method.options.post_normalization)
    ratio = (scaled * c).sum((1, 2), keepdim=True) * reciprocal_or_zero((c * c).sum((1, 2), keepdim=True))
    kernel = kernel * ratio
    return Factors(m, torch.bmm(m, kernel), kernel)
