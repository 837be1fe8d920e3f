r"""Matrix square roots by several methods, with the gradient by the Lyapunov equation.

**Gradient.** The gradient X of the root Y of A solves :math:`Y X + X Y = G`, with G the symmetrized gradient
of Y (T.-Y. Lin, S. Maji, BMVC 2017). Two solvers:

* by eigenvalues :math:`s_i` of Y, :math:`X = U ((U^T G U)_{ij} / (s_i + s_j)) U^T`: one decomposition and
  four products;
* by iteration (Y. Song, N. Sebe, W. Wang, ICLR 2022), from :math:`B = Y/\sqrt t`, :math:`C = G/\sqrt t` with
  :math:`t = \|A\|_F` of each matrix,

  .. math::
      B \leftarrow \tfrac12 B (3I - B^2), \qquad
      C \leftarrow \tfrac12 \big(C (3I - B^2) - B^2 C + B C B\big), \qquad X = C - \tfrac12 B C B,

  ``5K + 2`` products. The published end, :math:`X = \tfrac12 C`, is the same for a regular Y. For a singular
  Y it halves the gradient between range and null space.

**Approximants** for :math:`A` with eigenvalues :math:`\lambda = s^2` in [0, 1], from the same paper:

* Taylor: :math:`A \sum_{k<K} \binom{2k}{k} 4^{-k} (I - A)^k`; K products.
* Padé, with N even,

  .. math::
      \sqrt\lambda \approx \lambda\,\frac{\sum_j \binom{N}{2j+1} \lambda^j}{\sum_j \binom{N}{2j} \lambda^j} .

  The coefficients are positive, so the quotient takes one Cholesky factorization; N/2 - 1 products.

Both vanish at zero. The published form does not: its [5/5] quotient is 1/11 at λ = 0, which is wrong for a
covariance with fewer positions than channels.

Shapes: matrices ``(B, m, m)``.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional.eigen import matrix_power, rank_tolerance, reciprocal_of_sums, spectrum
from covpool.functional.newton_schulz import check_steps, newton_schulz, paper_steps
from covpool.functional.numerics import (
    at_least_float32,
    autocast_off,
    check_square,
    largest_entry,
    norm_of,
    once_differentiable,
    reciprocal_or_zero,
    root_or_zero,
)

RootForward = Literal["svd", "newton_schulz", "pade", "taylor"]
RootBackward = Literal["svd", "lyapunov", "lyapunov_iteration"]


class RootOptions(NamedTuple):
    """The methods for value and gradient.

    Attributes:
        forward: ``"svd"``, ``"newton_schulz"``, ``"pade"`` or ``"taylor"``. The singular value decomposition
            of a positive semi-definite matrix is its eigendecomposition, computed as such.
        backward: ``"svd"`` uses the eigenvalues of the matrix, ``"lyapunov"`` those of its root,
            ``"lyapunov_iteration"`` only products.
        order: number of steps of the iteration, or degree of the polynomials.
        backward_steps: number of steps of ``"lyapunov_iteration"``.
    """

    forward: RootForward
    backward: RootBackward
    order: int = 0
    backward_steps: int = 0


def matrix_root(a: Tensor, options: RootOptions) -> Tensor:
    """Return the root of positive semi-definite ``(..., m, m)``; zero for zero. Differentiable once."""
    check_square("a", a)
    if options.forward == "newton_schulz":
        check_steps(options.order, torch.promote_types(a.dtype, torch.float32))
    if options.forward == "svd" and options.backward != "lyapunov_iteration":
        # The gradient reuses the eigenvalues of the value; both equations then have the same solution.
        return matrix_power(a, 0.5)
    with autocast_off(a):
        a_Bmm = at_least_float32(a).reshape(-1, *a.shape[-2:])
        root_Bmm: Tensor = _MatrixRoot.apply(a_Bmm, options)  # type: ignore[no-untyped-call]
        return root_Bmm.reshape(a.shape)


def _value(a: Tensor, options: RootOptions) -> Tensor:
    if options.forward == "svd":
        of_a = spectrum(a)
        return of_a.assemble(of_a.values.sqrt())
    # Each matrix has its own norm: one norm per batch would make images depend on each other.
    unit = largest_entry(a)
    a = a * reciprocal_or_zero(unit)
    t = norm_of(a, "frobenius")
    a = a * reciprocal_or_zero(t)
    if options.forward == "newton_schulz":
        root, _ = newton_schulz(a, paper_steps(options.order))
    else:
        root = (pade_root if options.forward == "pade" else taylor_root)(a, options.order)
    return root * root_or_zero(t * unit)


def _gradient(a: Tensor, root: Tensor, grad: Tensor, options: RootOptions) -> Tensor:
    if options.backward == "svd":
        of_a = spectrum(a)
        return of_a.hadamard(reciprocal_of_sums(of_a.values.sqrt()), grad)
    if options.backward == "lyapunov":
        return solve_by_eigenvalues(root, grad)
    return solve_by_iteration(root, grad, options.backward_steps)


class _MatrixRoot(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, options: RootOptions) -> Tensor:
        with autocast_off(a):
            return _value(a, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, RootOptions], output: Tensor) -> None:
        a, ctx.options = inputs
        ctx.save_for_backward(a, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        a, root = ctx.saved_tensors
        grad = (grads[0] + grads[0].mT) * 0.5
        with autocast_off(a):
            gradient = _gradient(a, root, grad, ctx.options)
        # It is not the gradient of the computed value, so a second derivative would be meaningless.
        return once_differentiable(gradient, a, grad), None


def solve_by_eigenvalues(root: Tensor, grad: Tensor) -> Tensor:
    """Solve ``Y X + X Y = G`` for X, with a positive semi-definite Y and a symmetric G."""
    of_root = spectrum(root)
    # Rounding errors of zero in A = Y² are their square roots in Y.
    largest = of_root.values[:, -1:]
    null = of_root.values <= rank_tolerance(root) ** 0.5 * largest
    coefficients = reciprocal_of_sums(of_root.values.masked_fill(null, 0.0))
    return of_root.hadamard(coefficients, grad)


def solve_by_iteration(root: Tensor, grad: Tensor, steps: int) -> Tensor:
    """Solve the same equation by ``steps`` iterations of products only."""
    unit = reciprocal_or_zero(largest_entry(root))  # no square of an entry may overflow
    root = root * unit
    squared = torch.bmm(root, root)
    scale = reciprocal_or_zero(root_or_zero(norm_of(squared, "frobenius")))
    b, b_squared, c = root * scale, squared * scale.square(), grad * scale
    for k in range(steps):
        half = 1.5 * c - torch.bmm(c, b_squared)
        c = 0.5 * (half + half.mT + torch.bmm(torch.bmm(b, c), b))
        b = 1.5 * b - 0.5 * torch.bmm(b, b_squared)
        if k < steps - 1:
            b_squared = torch.bmm(b, b)
    return (c - 0.5 * torch.bmm(torch.bmm(b, c), b)) * unit


def taylor_root(a: Tensor, degree: int) -> Tensor:
    """Return the Taylor polynomial of this degree in A: A times that of (1 − z)^(−½), z = 1 − A."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = identity - a
    total = _coefficient(degree - 1) * identity.expand_as(a)
    for k in reversed(range(degree - 1)):
        total = torch.bmm(total, z) + _coefficient(k) * identity
    return torch.bmm(a, total)


def pade_root(a: Tensor, degree: int) -> Tensor:
    """Return the quotient of two polynomials of this degree in A, zero at zero."""
    order = 2 * degree
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    upper, lower, power = order * a, identity.expand_as(a), a
    for j in range(1, degree + 1):
        lower = lower + math.comb(order, 2 * j) * power
        if j < degree:
            power = torch.bmm(power, a)
            upper = upper + math.comb(order, 2 * j + 1) * power
    # cholesky_ex does not raise: a matrix with NaN must not stop the others of its batch.
    factor, _ = torch.linalg.cholesky_ex(lower)
    root = torch.cholesky_solve(upper, factor)
    return (root + root.mT) * 0.5


def _coefficient(k: int) -> float:
    """Return the coefficient of ``z^k`` in ``(1 − z)^(−½)``."""
    return float(math.comb(2 * k, k) / 4**k)
