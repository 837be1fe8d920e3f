r"""The square root near the identity by one polynomial or one quotient of polynomials.

For :math:`A` with eigenvalues :math:`\lambda = s^2` in [0, 1]:

* Taylor: :math:`\sqrt\lambda = \lambda (1-z)^{-1/2}` with :math:`z = 1 - \lambda`, hence
  :math:`A \sum_{k<K} \binom{2k}{k} 4^{-k} (I - A)^k`; K products.
* Padé: from :math:`\left|\frac{1-s}{1+s}\right| < 1`, with N even,

  .. math::
      \sqrt\lambda \approx s\,\frac{(1+s)^N - (1-s)^N}{(1+s)^N + (1-s)^N}
                   = \lambda\,\frac{\sum_j \binom{N}{2j+1} \lambda^j}{\sum_j \binom{N}{2j} \lambda^j},

  λ times the Padé approximant of :math:`(1-z)^{-1/2}` of degrees N/2 - 1 and N/2. Its coefficients are
  positive, so that the lower polynomial is positive definite and the quotient takes one Cholesky
  factorisation; N/2 - 1 products.

Both vanish at zero. The form usually printed, for :math:`(1-z)^{1/2}` itself, does not: its [5/5] quotient is
1/11 at λ = 0, and a covariance of fewer positions than channels, which is full of zero eigenvalues, comes out
wrong by that much of its norm in each of those directions.

Shapes: ``(B, m, m)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def taylor_root(a: Tensor, degree: int) -> Tensor:
    """The polynomial of this degree in A."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = identity - a
    total = _coefficient(degree - 1) * identity.expand_as(a)
    for k in reversed(range(degree - 1)):
        total = torch.bmm(total, z) + _coefficient(k) * identity
    return torch.bmm(a, total)


def pade_root(a: Tensor, degree: int) -> Tensor:
    """The quotient of two polynomials of this degree in A."""
    order = 2 * degree
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    upper, lower, power = order * a, identity.expand_as(a), a
    for j in range(1, degree + 1):
        lower = lower + math.comb(order, 2 * j) * power
        if j < degree:
            power = torch.bmm(power, a)
            upper = upper + math.comb(order, 2 * j + 1) * power
    # Without a check: a matrix with NaN must not stop the others of its batch.
    factor, _ = torch.linalg.cholesky_ex(lower)
    root = torch.cholesky_solve(upper, factor)
    return (root + root.mT) * 0.5


def _coefficient(k: int) -> float:
    """Of ``z^k`` in ``(1 − z)^(−½)``."""
    return float(math.comb(2 * k, k) / 4**k)
