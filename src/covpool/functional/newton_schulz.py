r"""The coupled Newton-Schulz iteration: value, gradient and tangent, on plain tensors.

Equations of the iSQRT-COV paper, and their tests in ``tests/functional/test_newton_schulz.py``:

- Eqn. (2), the iteration: :func:`newton_schulz`, ``test_equation_2``.
- Eqns. (6) and (7), the gradient: :func:`newton_schulz_backward`, ``test_equations_6_and_7``.
- Not in the paper, the tangent: :func:`newton_schulz_jvp`, ``test_tangent``.

The others are elsewhere, with their tests in ``test_normalization.py`` and ``test_covariance.py``:

- Eqns. (3) and (4), division by the norm and compensation, and their gradients (5) and (8) to (10):
  :mod:`covpool.functional.scaled_root`.
- Eqn. (11), the gradient of the covariance: :mod:`covpool.functional.covariance`.

The tests compare with the equations as printed (``tests/functional/paper.py``), and these with
autograd (``test_the_equations_are_the_gradient``). The paper's N, the number of steps, is K here.

From ``Y_0 = A`` and ``Z_0 = I``, with two coefficients for each step:

.. math::
    T_k = a_k I + b_k Z_k Y_k, \qquad Y_{k+1} = Y_k T_k, \qquad Z_{k+1} = T_k Z_k .

Eqn. (2) has ``a = 3/2`` and ``b = −1/2`` in every step. ``Y_K`` then tends to :math:`A^{1/2}` and ``Z_K`` to
:math:`A^{-1/2}` on the range of A. :func:`fitted_steps` returns coefficients that give almost the same
``Y_5`` in fewer steps. For any coefficients ``Y_K = A Z_K``, and each eigenvalue of ``Y_K`` is a fixed
function of one eigenvalue of A.

Every tensor is ``(B, m, m)`` and symmetric. Every iterate is a polynomial in A, so all of them commute: the
gradient needs fewer products than Eqn. (6) as printed.

Cost in matrix products for K >= 2: value ``3K - 3``, gradient ``4K - 4``, tangent ``7K - 7``
(``tests/functional/test_products.py``).

This file does not use autograd: :mod:`covpool.functional.matrix_sqrt` and
:mod:`covpool.functional.isqrt_cov` wrap these functions for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor

from covpool.arguments import check_choice, check_whole
from covpool.errors import UsageError
from covpool.functional.numerics import buffers

Iteration = Literal["fitted", "paper"]
ITERATIONS = ("fitted", "paper")
# The default number of steps of each iteration. The paper recommends 5.
FITTED_STEPS, PAPER_STEPS = 3, 5
# (a_k, b_k) of every step.
Coefficients = tuple[tuple[float, float], ...]


def paper_steps(steps: int = PAPER_STEPS) -> Coefficients:
    """Return the coefficients of ``steps`` iterations of Eqn. (2)."""
    return ((1.5, -0.5),) * steps


def fitted_steps(steps: int = FITTED_STEPS) -> Coefficients:
    """Return coefficients with which 3 or 4 steps give almost the result of 5 steps of Eqn. (2).

    The largest relative error on any eigenvalue is 2.1 % with 3 steps and 0.031 % with 4.
    See ``python -m lab fitted_steps``.
    """
    fitted = {
        3: ((2.30946, -1.824852), (1.981331, -1.152304), (1.624617, -0.645636)),
        4: ((2.114557, -1.40073), (1.742399, -0.783681), (1.392109, -0.392109), (1.480068, -0.479763)),
    }
    if steps not in fitted:
        available = " or ".join(map(str, fitted))
        raise UsageError(
            f'steps must be {available} for iteration="fitted"; got {steps!r}: pass iteration="paper" for '
            "another number"
        )
    return fitted[steps]


# The most Newton-Schulz steps by the dtype of the iteration. Each step multiplies the rounding error of the
# gradient on the null space by up to 2.25. At these limits the gradient of a singular covariance is off by
# 7 %, 2.5 % and 0.1 %; the limit of float64 follows from the growth per step.
MOST_STEPS = {torch.bfloat16: 8, torch.float16: 10, torch.float32: 15, torch.float64: 40}


def check_steps(
    steps: object, dtype: torch.dtype = torch.float64, most: Mapping[torch.dtype, int] = MOST_STEPS
) -> None:
    """Raise unless ``steps`` is a whole number of at least one, and not more than ``dtype`` can bear.

    Where the dtype of the features is not known yet, that of the highest limit is assumed.
    """
    if isinstance(steps, int) and steps < 1:
        raise UsageError(f"steps must be at least 1 (the paper uses {PAPER_STEPS}); got {steps}")
    check_whole("steps", steps)
    assert isinstance(steps, int)
    if steps > most[dtype]:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(
            f"steps must be at most {most[dtype]} in {name}, because more steps amplify rounding errors; "
            f"got {steps} (the paper uses {PAPER_STEPS})"
        )


def step_coefficients(iteration: object, steps: int | None, dtype: torch.dtype) -> Coefficients:
    """Return ``(a, b)`` of every step. Raise unless the iteration has that number of steps.

    Args:
        iteration: ``"fitted"``, with 3 or 4 steps, or ``"paper"``, with any number.
        steps: K; ``None`` for the default of the iteration.
        dtype: the dtype of the iteration, which limits the number of steps.
    """
    check_choice("iteration", iteration, ITERATIONS)
    if steps is None:
        steps = FITTED_STEPS if iteration == "fitted" else PAPER_STEPS
    check_steps(steps, dtype)
    return fitted_steps(steps) if iteration == "fitted" else paper_steps(steps)


@dataclass(frozen=True)
class Iterates:
    """The iterates that the gradient needs: ``Y_0 .. Y_{K-1}`` and ``Z_2 .. Z_{K-1}``.

    ``Z_0`` is I, and ``Z_1 = a_0 I + b_0 Y_0`` is cheaper to compute again than to save.
    """

    ys: tuple[Tensor, ...]
    zs: tuple[Tensor, ...]
    coefficients: Coefficients

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All iterates in one tuple, as autograd saves tensors."""
        return (*self.ys, *self.zs)

    @classmethod
    def from_flat(cls, tensors: tuple[Tensor, ...], coefficients: Coefficients) -> Iterates:
        """Undo :attr:`flat`: first K tensors ``Y``, then K - 2 tensors ``Z`` (none for K = 1)."""
        steps = len(coefficients)
        return cls(tensors[:steps], tensors[steps:], coefficients)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return ``(Y_k, Z_k)`` for k = 1 .. K-1."""
        if len(self.ys) == 1:
            return []
        return list(zip(self.ys[1:], (_first_t(self.ys[0], self.coefficients[0]), *self.zs), strict=True))


def newton_schulz(
    a: Tensor, coefficients: Coefficients, inverse: bool = False, keep: bool = False
) -> tuple[Tensor, Iterates]:
    """Run the iteration and return ``Y_K`` (or ``Z_K`` for ``inverse``) with the iterates before it.

    The first step takes one product instead of three, because ``Z_0 = I``. The last step takes two, because
    only ``Y_K`` or ``Z_K`` is needed. With ``keep`` the iterates share one allocation.
    """
    steps = len(coefficients)
    out = buffers(a, 2 * steps - 3) if keep and steps > 1 else repeat(None)
    t = _first_t(a, coefficients[0])
    t_out = next(buffers(a, 1)) if steps > 1 else None  # the same memory for every T_k
    y, z = a, t
    ys, zs = [a], []
    for k in range(1, steps):
        y = torch.bmm(y, t, out=next(out))
        ys.append(y)
        if k > 1:
            z = torch.bmm(t, z, out=next(out))
            zs.append(z)
        t = _t(z, y, coefficients[k], out=t_out)
    if inverse:
        result = torch.bmm(t, z) if steps > 1 else t
    else:
        result = torch.bmm(y, t)
    return result, Iterates(tuple(ys), tuple(zs), coefficients)


def newton_schulz_backward(grad: Tensor, iterates: Iterates, inverse: bool = False) -> Tensor:
    r"""Return the gradient with respect to A, given the symmetric gradient of ``Y_K`` (or of ``Z_K``).

    Let ``G`` and ``H`` be the gradients of ``Y_{k+1}`` and ``Z_{k+1}``. Because Y and Z commute, those of
    ``Y_k`` and ``Z_k`` are

    .. math::
        G' &= a G + b (GYZ + ZYG + ZHZ) \\
        H' &= a H + b (HZY + YZH + YGY) .

    With ``a = 3/2`` and ``b = −1/2`` this is Eqn. (6). Both are symmetric, so each is ``N + Nᵀ`` of one half
    of its terms. The halves share two products, ``E = YG`` and ``F = HZ``:

    .. math::
        G' = N_G + N_G^T, \quad N_G = \tfrac{a}{2} G + b Z (E + \tfrac12 F), \qquad
        H' = N_H + N_H^T, \quad N_H = \tfrac{a}{2} H + b (F + \tfrac12 E) Y .

    This takes 4 products per step; Eqn. (6) as printed takes 10. ``grad`` may be overwritten.
    """
    start, pairs = iterates.ys[0], iterates.pairs()
    first, *later = iterates.coefficients
    if not pairs:
        return grad * first[1] if inverse else _backward_first(grad, None, start, first, reuse=False)
    out = buffers(grad, 4)
    p = next(out)
    reuse = p is not None
    y, z = pairs.pop()
    g, h, e, f = _backward_last(grad, y, z, later.pop(), inverse, out)
    for (y, z), step in zip(reversed(pairs), reversed(later), strict=True):
        e, f = torch.bmm(y, g, out=e), torch.bmm(h, z, out=f)
        e_half_f = torch.add(e, f, alpha=0.5, out=p)
        f_half_e = torch.add(f, e, alpha=0.5, out=f if reuse else None)
        g, e = _symmetric_sum(g, z, e_half_f, step, out=e if reuse else None)
        h, f = _symmetric_sum(h, f_half_e, y, step, out=f if reuse else None)
    return _backward_first(g, h, start, first, reuse)


def newton_schulz_jvp(tangent: Tensor, iterates: Iterates, inverse: bool = False) -> Tensor:
    """Return the directional derivative of ``Y_K`` (or ``Z_K``) along a symmetric ``tangent`` of A."""
    first, *later = iterates.coefficients
    y, dy = iterates.ys[0], tangent
    t, dt = _first_t(y, first), tangent * first[1]
    z, dz = t, dt
    for k, (next_y, next_z) in enumerate(iterates.pairs()):
        dy = torch.bmm(dy, t) + torch.bmm(y, dt)
        if k > 0:
            dz = torch.bmm(dt, z) + torch.bmm(t, dz)
        y, z = next_y, next_z
        t = _t(z, y, later[k])
        dt = (torch.bmm(dz, y) + torch.bmm(z, dy)) * later[k][1]
    if not inverse:
        return torch.bmm(dy, t) + torch.bmm(y, dt)
    return torch.bmm(dt, z) + torch.bmm(t, dz) if len(iterates.ys) > 1 else dt


def _backward_last(
    grad: Tensor,
    y: Tensor,
    z: Tensor,
    step: tuple[float, float],
    inverse: bool,
    out: Iterator[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute G' and H' of the last step, where one of the two incoming gradients is zero: 3 products.

    Returns both and two tensors that may be overwritten.
    """
    inner_out, one_sided_out, symmetric_out = next(out), next(out), next(out)
    if inverse:
        f = torch.bmm(grad, z, out=inner_out)
        g = _scaled_product(z, f, step[1], out=one_sided_out)
        h, spare = _symmetric_sum(grad, f, y, step, out=symmetric_out)
    else:
        e = torch.bmm(y, grad, out=inner_out)
        h = _scaled_product(e, y, step[1], out=one_sided_out)
        g, spare = _symmetric_sum(grad, z, e, step, out=symmetric_out)
    return g, h, inner_out, spare


def _symmetric_sum(
    g: Tensor, x: Tensor, y: Tensor, step: tuple[float, float], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return ``N + Nᵀ`` with ``N = a/2 g + b xy``, and the memory of g, which is free afterwards."""
    a, b = step
    n = accumulate(g, x, y, beta=a / 2, alpha=b, overwrite=out is not None)
    return torch.add(n, n.mT, out=out), None if out is None else n


def _backward_first(
    g: Tensor, h: Tensor | None, start: Tensor, step: tuple[float, float], reuse: bool
) -> Tensor:
    """Return the gradient of A, ``aG + b(GA + AG + H)``: 1 product. The paper's is Eqn. (7)."""
    a, b = step
    if h is None:
        n = torch.baddbmm(g, g, start, beta=a / 2, alpha=b)
    else:
        n = accumulate(h, g, start, beta=b / 2, alpha=b, overwrite=reuse)
        n = torch.add(n, g, alpha=a / 2, out=n if reuse else None)
    return torch.add(n, n.mT, out=g if reuse else None)


def _first_t(start: Tensor, step: tuple[float, float]) -> Tensor:
    """Return ``aI + bA``: ``T_0``, which is also ``Z_1``."""
    a, b = step
    return _plus_identity(start * b, a)


def _t(z: Tensor, y: Tensor, step: tuple[float, float], out: Tensor | None = None) -> Tensor:
    """Return ``aI + bZY``: ``T_k``. The product includes the factor b; then only the diagonal changes."""
    a, b = step
    return _plus_identity(_scaled_product(z, y, b, out=out), a)


def _plus_identity(t: Tensor, value: float) -> Tensor:
    """Return ``t + value · I``; t is overwritten."""
    if torch.compiler.is_exporting():  # the ONNX exporter cannot write through a view
        return t + value * torch.eye(t.shape[-1], dtype=t.dtype, device=t.device)
    t.diagonal(dim1=-2, dim2=-1).add_(value)
    return t


def _scaled_product(x: Tensor, y: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """Return ``alpha · xy`` without an elementwise pass (``beta=0`` ignores the first operand)."""
    return torch.baddbmm(x, x, y, beta=0, alpha=alpha, out=out)


def accumulate(total: Tensor, x: Tensor, y: Tensor, *, beta: float, alpha: float, overwrite: bool) -> Tensor:
    """Return ``beta · total + alpha · xy``; ``overwrite`` allows to write it into ``total``."""
    if overwrite:
        return total.baddbmm_(x, y, beta=beta, alpha=alpha)
    return torch.baddbmm(total, x, y, beta=beta, alpha=alpha)
