"""Bilinear pooling: B-CNN and improved B-CNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from covpool.arguments import check_choice, check_not_negative, check_whole
from covpool.functional.covariance import second_moment, triu_vec, without_outliers
from covpool.functional.matrix_root import RootBackward, RootForward, RootOptions, matrix_root
from covpool.functional.newton_schulz import check_steps
from covpool.functional.numerics import at_least_float32, in_units_of_largest, l2_normalized, signed_root
from covpool.nn.pooling.method import Method


class Bcnn(Method):
    r"""The second moment, the signed root of its entries, and unit length: d(d+1)/2 values.

    T.-Y. Lin, A. RoyChowdhury, S. Maji, "Bilinear CNN Models for Fine-grained Visual Recognition",
    ICCV 2015, with both streams the same network.

    .. math::
        P = \tfrac1n X X^T, \qquad
        y = \operatorname{triu}\big(\operatorname{sign}(P) \sqrt{|P|}\big), \qquad z = y / \|y\|_2

    The paper's vector has all d² entries. Here entries off the diagonal appear once, as in the other methods,
    so norms and inner products differ from the paper's. The root acts on entries, not on eigenvalues: zero
    eigenvalues may become nonzero. The result does not depend on the scale of x, and is zero where x is zero.

    Cost: one product of d×n by n×d forward, two backward.
    """

    summary: ClassVar[str] = "signed root of the entries of the second moment, of unit length (B-CNN)"

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x = at_least_float32(x)
        p_BCC = second_moment(in_units_of_largest(without_outliers(x, weights)), weights=weights)
        return l2_normalized(signed_root(triu_vec(p_BCC)))


FORWARDS = ("newton_schulz", "svd")
BACKWARDS = ("lyapunov", "lyapunov_iteration", "svd")


@dataclass(frozen=True)
class ImprovedBcnnOptions:
    """The methods for value and gradient of the root.

    Attributes:
        forward: ``"newton_schulz"`` or ``"svd"``. The singular value decomposition of a positive
            semi-definite matrix is its eigendecomposition, and is computed as such.
        backward: ``"lyapunov"`` solves Lyapunov's equation by eigenvalues of the root,
            ``"lyapunov_iteration"`` by products only; ``"svd"`` uses the eigenvalues of the matrix. After
            ``forward="svd"`` the first and the last are the same computation.
        steps: number of Newton-Schulz iterations.
        backward_steps: number of iterations for Lyapunov's equation.
        eps: ε, relative to the norm of all entries; makes the elementwise root less steep near zero. Zero is
            the published root, with which a small AlexNet did not learn from scratch; with 0.01 it did.
    """

    forward: RootForward = "svd"
    backward: RootBackward = "lyapunov"
    steps: int = 10
    backward_steps: int = 10
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_choice("forward", self.forward, FORWARDS)
        check_choice("backward", self.backward, BACKWARDS)
        check_steps(self.steps)
        check_whole("backward_steps", self.backward_steps)
        check_not_negative("eps", self.eps)


class ImprovedBcnn(Method):
    r"""The root of the second moment, its signed elementwise root, and :math:`\ell_2` normalization.

    .. math::
        P = \tfrac1n X X^T, \qquad v = \operatorname{sign}(P^{1/2}) \sqrt{|P^{1/2}|}, \qquad v / \|v\|_2

    T.-Y. Lin, S. Maji, "Improved Bilinear Pooling with CNNs", BMVC 2017: the four variants of the iSQRT-COV
    paper's Table 2 and the iterative solution. The result has d(d+1)/2 values. Cost in addition to the second
    moment: forward one eigendecomposition and a product, or ``3K - 3`` products; backward one
    decomposition (none after a forward by SVD) and four products, or ``5K + 2``. Zero eigenvalues stay
    zero.

    The gradient is that of the exact root. It is fragile in two ways that no other method here has. First,
    the elementwise root is steep near zero, where many entries of a matrix root are: in float32 the error of
    the gradient may be as large as the gradient, unless ``eps`` is set. Second, where Newton-Schulz has not
    converged, small eigenvalues are too small, and Lyapunov's equation divides by them.
    """

    summary: ClassVar[str] = "matrix root, signed root and l2 norm of the second moment (improved B-CNN)"
    Options: ClassVar[type[ImprovedBcnnOptions]] = ImprovedBcnnOptions
    options: ImprovedBcnnOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        options = self.options
        how = RootOptions(options.forward, options.backward, options.steps, options.backward_steps)
        root = matrix_root(second_moment(x, weights=weights), how)
        entries = triu_vec(root)
        if options.eps:
            entries = l2_normalized(entries)
        return l2_normalized(signed_root(entries, eps=options.eps))
