r"""The gradient of a matrix square root as the solution of a Lyapunov equation.

From :math:`Y^2 = A` follows :math:`Y\,dY + dY\,Y = dA`, hence for the gradient G of the root (symmetrised)

.. math::
    Y X + X Y = G, \qquad X = \frac{\partial l}{\partial A} .

It does not matter how Y was computed; where Y is an approximation, so is X. Two solvers:

* by eigenvalues :math:`s_i` of Y, :math:`X = U ((U^T G U)_{ij} / (s_i + s_j)) U^T`: one decomposition and
  four products;
* by iteration, the coupled Newton-Schulz iteration for the sign of :math:`\begin{pmatrix} B & C \\ 0 & -B
  \end{pmatrix}`, from :math:`B = Y/\sqrt t`, :math:`C = G/\sqrt t` with :math:`t = \|A\|_F` of each matrix,

  .. math::
      B \leftarrow \tfrac12 B (3I - B^2), \qquad
      C \leftarrow \tfrac12 \big(C (3I - B^2) - B^2 C + B C B\big), \qquad X = \tfrac12 C,

  five products a step. After few steps, directions with :math:`s \ll \sqrt t` have not converged: their part
  of X is too small.

Zero eigenvalues: between a range and a null direction the equation gives :math:`G_{i0}/s_i`, as it should;
between two null directions nothing, and X is zero there by eigenvalues and :math:`1.5^K` times G by
iteration, which the features never see (:mod:`covpool.functional.eigen` says why).

Shapes: matrices ``(B, m, m)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from covpool.functional.eigen import rank_tolerance, reciprocal_of_sums, spectrum
from covpool.functional.normalization import largest_entry, norm_of, reciprocal_or_zero, root_or_zero


def solve_by_eigenvalues(root: Tensor, grad: Tensor) -> Tensor:
    """X of ``Y X + X Y = G`` for a positive semi-definite Y and a symmetric G."""
    of_root = spectrum(root)
    # What is rounding of zero in A = Y² is the square root of that in Y.
    largest = of_root.values[:, -1:]
    null = of_root.values <= rank_tolerance(root) ** 0.5 * largest
    coefficients = reciprocal_of_sums(of_root.values.masked_fill(null, 0.0))
    return of_root.hadamard(coefficients, grad)


def solve_by_iteration(root: Tensor, grad: Tensor, steps: int) -> Tensor:
    """The same by ``steps`` steps of products alone."""
    unit = reciprocal_or_zero(largest_entry(root))  # no square of an entry may overflow
    root = root * unit
    squared = torch.bmm(root, root)
    scale = reciprocal_or_zero(root_or_zero(norm_of(squared, "frobenius")))
    b, b_squared, c = root * scale, squared * scale.square(), grad * scale
    for k in range(steps):
        half = 1.5 * c - torch.bmm(c, b_squared)
        c = 0.5 * (half + half.mT + torch.bmm(torch.bmm(b, c), b))
        if k < steps - 1:
            b = 1.5 * b - 0.5 * torch.bmm(b, b_squared)
            b_squared = torch.bmm(b, b)
    return c * (0.5 * unit)
