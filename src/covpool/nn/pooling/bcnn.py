"""B-CNN: bilinear pooling with its elementwise normalisation."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from covpool.functional.elementwise import in_units_of_largest, l2_normalized, signed_root
from covpool.functional.precision import at_least_float32
from covpool.functional.second_moment import second_moment
from covpool.functional.triu import triu_vec
from covpool.functional.weighting import without_outliers
from covpool.nn.pooling.method import Method


class Bcnn(Method):
    r"""The second moment, the signed root of its entries, and unit length: d(d+1)/2 numbers.

    T.-Y. Lin, A. RoyChowdhury, S. Maji, "Bilinear CNN Models for Fine-grained Visual Recognition",
    ICCV 2015, with both streams the same network.

    .. math::
        P = \tfrac1n X X^T, \qquad
        y = \operatorname{triu}\big(\operatorname{sign}(P) \sqrt{|P|}\big), \qquad z = y / \|y\|_2

    The paper's vector has all d² entries, every one off the diagonal twice; here it is there once, as in
    the other methods, so the norm is that of the triangle and inner products are not those of the paper.
    The root is of the entries and not of the matrix: it does not act on eigenvalues, and those that are
    zero need not stay so. The same for every scale of x, and zero where x is zero.

    Cost: one product of d×n by n×d forward, two backward.
    """

    summary: ClassVar[str] = "signed root of the entries of the second moment, of unit length (B-CNN)"

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        x = at_least_float32(x)
        if weights is not None:
            x = without_outliers(x, weights)
        p_BCC = second_moment(in_units_of_largest(x), weights=weights)
        return l2_normalized(signed_root(triu_vec(p_BCC)))
