"""The mean of features over positions: first-order pooling."""

from __future__ import annotations

from torch import Tensor

from covpool.functional.precision import at_least_float32
from covpool.functional.weighting import normalized_weights, without_outliers


def mean(x: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""The mean over positions, :math:`\tfrac1n \sum_p x_p`, or :math:`\sum_p w_p x_p` with weights.

    Args:
        x: features ``(B, C, n)``.
        weights: ``(B, n)``, a bool mask or numbers >= 0, divided by their sum. Positions of weight zero may
            hold anything, NaN included.

    Returns:
        ``(B, C)``, in float32 for half-precision input.
    """
    x_BCn = at_least_float32(x)
    if weights is None:
        return x_BCn.mean(-1)
    w_B1n = normalized_weights(weights, x_BCn.dtype).unsqueeze(1)
    # Not a product of matrices: autocast would take that to half precision.
    return (without_outliers(x_BCn, weights) * w_B1n).sum(-1)
