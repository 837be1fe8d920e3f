"""Global average pooling: the first-order baseline, behind the same interface."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from covpool.functional.mean import mean
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
        return mean(x, weights)
