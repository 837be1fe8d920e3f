"""Global average pooling: the first-order baseline, behind the same interface."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from covpool.functional.precision import at_least_float32
from covpool.functional.weighting import normalized_weights, without_outliers
from covpool.nn.pooling.method import Method


class Gap(Method):
    r"""The mean over positions, :math:`\tfrac1n \sum_p x_p`, or :math:`\sum_p w_p x_p` with weights.

    What every image network ends with. It has no use for a reduction: make the layer with ``dim=None``.
    """

    summary: ClassVar[str] = "global average pooling, the first-order baseline"
    order: ClassVar[int] = 1

    @property
    def out_features(self) -> int:
        """As many as there are channels."""
        return self.channels

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average x ``(B, C, n)``, with weights ``(B, n)`` or none, in float32 at least."""
        x_BCn = at_least_float32(x)
        if weights is None:
            return x_BCn.mean(-1)
        w_B1n = normalized_weights(weights, x_BCn.dtype).unsqueeze(1)
        # Not a product of matrices: autocast would take that to half precision.
        return (without_outliers(x_BCn, weights) * w_B1n).sum(-1)
