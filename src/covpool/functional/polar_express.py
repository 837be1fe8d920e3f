r"""The square root by a composition of optimal polynomials, in coupled form.

N. Amsel, D. Persson, C. Musco, R. Gower, "The Polar Express: Optimal Matrix Sign Methods and Their
Application to the Muon Algorithm", 2025. Newton-Schulz repeats one polynomial, which is best for values that
are near 1 already. Here each step has its own: of all odd polynomials of degree five it is the one that
brings the interval known to hold every value nearest to 1,

.. math::
    p_k = \arg\min_p \max_{x \in [l_k, u_k]} |1 - p(x)|, \qquad
    p(x) = a x + b x^3 + c x^5, \qquad [l_{k+1}, u_{k+1}] = [p_k(l_k), \; 2 - p_k(l_k)] .

With :math:`x = \sqrt\lambda`, each step multiplies by a polynomial in the matrix alone. From
:math:`G_0 = P_0 = A`,

.. math::
    W = a I + b P + c P^2, \qquad G \leftarrow G W, \qquad P \leftarrow W P W,

where every matrix is a polynomial in A and commutes with every other, so that :math:`G^2 = A P` throughout:
P tends to the identity on the range of A and G to :math:`A^{1/2}`.

The bound l on the smallest x is stated, not measured: eigenvalues of A below :math:`l^2` come out too small,
and zero stays zero. Products: ``4K - 3`` forward (17 at K = 5), twice as many backward, by autograd.

Shapes: ``(B, m, m)``.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from covpool.errors import UsageError
from covpool.functional.newton_schulz import check_steps
from covpool.functional.numerics import (
    at_least_float32,
    autocast_off,
    check_square,
    largest_entry,
    norm_of,
    reciprocal_or_zero,
    root_or_zero,
)

# The defaults: the number of polynomials, and the smallest √λ that they are made for.
STEPS, LOWER = 5, 1e-2
# The gradient of a singular matrix is off by up to 2 % at the limit of float32, by 25 % two steps later.
MOST_STEPS = {torch.float32: 8, torch.float64: 20}


class OddQuintic(NamedTuple):
    """``a x + b x³ + c x⁵``."""

    a: float
    b: float
    c: float

    def __call__(self, x: float) -> float:
        """Its value."""
        return x * (self.a + x * x * (self.b + x * x * self.c))


def polar_express_sqrt(a: Tensor, *, steps: int = STEPS, lower: float = LOWER) -> Tensor:
    r"""Square root of positive semi-definite matrices by ``steps`` optimal polynomials.

    Args:
        a: ``(..., m, m)``. It is divided by its Frobenius norm t, and the root multiplied by √t.
        steps: K, at most 8 in float32 and 20 in float64: more steps amplify rounding errors.
        lower: l. The polynomials are optimal for eigenvalues from :math:`l^2 t` to t. The largest relative
            error of their roots after 5 steps is 1e-6 for l = 1e-2, and 0.1 for l = 1e-3.

    Returns:
        ``(..., m, m)``, in float32 for half-precision input; zero for zero.

    Example:
        >>> polar_express_sqrt(torch.diag(torch.tensor([4.0, 1.0])), steps=8)
        tensor([[2.0000, 0.0000],
                [0.0000, 1.0000]])
    """
    check_steps(steps, most=MOST_STEPS)
    check_lower(lower)
    return root_by_polynomials(a, optimal_polynomials(lower, steps))


def root_by_polynomials(a: Tensor, polynomials: tuple[OddQuintic, ...]) -> Tensor:
    """The same with polynomials made before: what torch.compile can trace."""
    check_square("a", a)
    check_steps(len(polynomials), torch.promote_types(a.dtype, torch.float32), MOST_STEPS)
    with autocast_off(a):
        a_Bmm = at_least_float32(a).reshape(-1, *a.shape[-2:])
        unit = largest_entry(a_Bmm)
        a_Bmm = (a_Bmm + a_Bmm.mT) * (0.5 * reciprocal_or_zero(unit))
        t = norm_of(a_Bmm, "frobenius")
        root_Bmm = _coupled(a_Bmm * reciprocal_or_zero(t), polynomials)
        return (root_Bmm * root_or_zero(t * unit)).reshape(a.shape)


def check_lower(lower: object) -> None:
    """Raise unless ``lower`` is a bound of values that end at 1."""
    if not isinstance(lower, float) or not 0 < lower < 1:
        raise UsageError(f"lower must be a number between 0 and 1; got {lower!r}")


def _coupled(a: Tensor, polynomials: tuple[OddQuintic, ...]) -> Tensor:
    g = p = a
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for k, (first, third, fifth) in enumerate(polynomials):
        w = first * identity + third * p + fifth * torch.bmm(p, p)
        g, old = torch.bmm(g, w), g
        if k < len(polynomials) - 1:
            pw = g if p is old else torch.bmm(p, w)  # G and P begin as the same matrix
            p = torch.bmm(w, pw)
    return g


@functools.cache
def optimal_polynomials(lower: float, steps: int) -> tuple[OddQuintic, ...]:
    """One for each step, each the best for the interval that the one before leaves."""
    polynomials = []
    low, high = lower, 1.0
    for _ in range(steps):
        polynomial = _best_on(low, high)
        polynomials.append(polynomial)
        low = polynomial(low)
        high = 2.0 - low
    return tuple(polynomials)


def _best_on(low: float, high: float) -> OddQuintic:
    """The odd quintic nearest to 1 on an interval, by Remez' exchange of the two inner points.

    The best one errs by the same E at four points, with alternating sign: ``p(x) = 1 ± E``.
    """
    if high - low < 1e-6:  # nothing left to gain: the polynomial that keeps 1 to the third order
        return OddQuintic(15 / 8, -10 / 8, 3 / 8)
    inner = (0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high)
    for _ in range(100):
        polynomial = _equioscillating((low, *inner, high))
        extremes = _inner_extremes(polynomial)
        if max(abs(new - old) for new, old in zip(extremes, inner, strict=True)) < 1e-14:
            break
        inner = extremes
    return polynomial


def _equioscillating(points: tuple[float, ...]) -> OddQuintic:
    """The p of a, b, c and E with ``p(x) + (−1)^i E = 1`` at four points, by elimination."""
    rows = [[x, x**3, x**5, (-1.0) ** i, 1.0] for i, x in enumerate(points)]
    for i in range(4):
        pivot = max(range(i, 4), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(4):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [y - factor * x for x, y in zip(rows[i], rows[k], strict=True)]
    return OddQuintic(*(rows[i][4] / rows[i][i] for i in range(3)))


def _inner_extremes(polynomial: OddQuintic) -> tuple[float, float]:
    """The two positive roots of ``a + 3 b x² + 5 c x⁴``."""
    a, b, c = polynomial
    spread = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
    return math.sqrt((-3 * b - spread) / (10 * c)), math.sqrt((-3 * b + spread) / (10 * c))
