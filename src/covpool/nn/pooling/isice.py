"""iSICE: a sparse inverse of the covariance by iteration, whose entries are partial correlations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covpool.arguments import check_not_negative, check_positive, check_whole
from covpool.functional.covariance import as_batch, center, triu_vec
from covpool.functional.matrix_sqrt import MatrixRoot
from covpool.functional.newton_schulz import paper_steps
from covpool.functional.numerics import (
    autocast_off,
    check_features,
    check_weights,
    largest_entry,
    norm_of,
    reciprocal_or_zero,
)
from covpool.functional.scaled_root import Rule, differentiable
from covpool.nn.pooling.method import Method

# The authors' number of Newton-Schulz steps for an inverse.
INVERSE_STEPS = 7


@dataclass(frozen=True)
class IsiceOptions:
    """The optimization.

    Attributes:
        steps: N, the number of gradient steps.
        lr: η, the first step size; it falls linearly to zero.
        sparsity: λ, the weight of the sum of absolute entries.
    """

    steps: int = 5
    lr: float = 5.0
    sparsity: float = 0.01

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_positive("lr", self.lr)
        check_not_negative("sparsity", self.sparsity)


class Isice(Method):
    r"""A sparse inverse covariance, as a vector of d(d+1)/2 values.

    S. Rahman, P. Koniusz, L. Wang, L. Zhou, P. Moghadam, C. Sun, "Learning Partial Correlation based Deep
    Visual Representation for Image Classification", CVPR 2023. With :math:`A = \Sigma/\operatorname{tr}
    \Sigma`, it approximates

    .. math::
        \arg\min_S \; \operatorname{tr}(S A) - \log\det S + \lambda \|S\|_1

    by N steps of projected gradient descent on the positive and the negative part of :math:`S = S^+ - S^-`,
    from :math:`S = A^{-1}`:

    .. math::
        S^\pm \leftarrow \max\big(0, \; S^\pm - \eta_i (\pm (A - S^{-1}) + \lambda)\big), \qquad
        \eta_i = \eta \big(1 - \tfrac{i}{N-1}\big)

    Both inverses are squares of the inverse root by 7 Newton-Schulz steps. The last step has size zero, as in
    the authors' code. Unlike it, the result is not divided by the trace again: S belongs to A, and does not
    depend on the scale of the features. A is not perturbed by random numbers either.

    Cost at 5 steps: 95 products forward, 130 backward, in addition to the covariance. Zero eigenvalues become
    large, up to 1.5^14 = 292 before the steps, because seven steps do not reach infinity.
    """

    summary: ClassVar[str] = "sparse inverse covariance by iteration, partial correlations (iSICE)"
    Options: ClassVar[type[IsiceOptions]] = IsiceOptions
    options: IsiceOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        check_features(x)
        if weights is not None:
            check_weights(weights, x)
        with autocast_off(x):
            m_BCn, _ = center(*as_batch(x, weights))
            sigma_BCC = torch.bmm(m_BCn, m_BCn.mT)
            a_BCC = sigma_BCC * reciprocal_or_zero(norm_of(sigma_BCC, "trace"))
            return triu_vec(sparse_inverse(a_BCC, self.options))


def sparse_inverse(a: Tensor, options: IsiceOptions) -> Tensor:
    """Return S of positive semi-definite matrices of trace 1, ``(B, C, C)``; zero for zero."""
    s = inverse(a)
    for i in range(options.steps - 1):  # the size of the last step is zero
        size = options.lr * (1 - i / (options.steps - 1))
        gradient = a - inverse(s)
        positive = (s.relu() - size * (gradient + options.sparsity)).relu()
        negative = ((-s).relu() - size * (options.sparsity - gradient)).relu()
        s = positive - negative
    return s


def inverse(a: Tensor) -> Tensor:
    """Return the square of the inverse root by Newton-Schulz iteration; zero for zero."""
    rule = Rule(paper_steps(INVERSE_STEPS), "trace", -0.5, inverse=True, dtype=a.dtype)
    z = differentiable(a, largest_entry(a), MatrixRoot(rule), save=True, tangent=False)
    return torch.bmm(z, z)
