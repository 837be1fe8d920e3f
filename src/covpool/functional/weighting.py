"""Weights of positions: what they are divided by, and what of a hidden position may meet a product.

Shapes: x ``(B, C, n)``, weights ``(B, n)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A feature at a position of weight zero that is this many times larger than every feature that counts
# is cut out before it meets a product: Inf and NaN would come out of it, and spread. (A whole number, for
# torch.compile takes a float of a module as an input of the graph.)
OUTLIER = 1000


def normalized_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights divided by their sum; all zero where all are zero; NaN where one is negative."""
    w = weights.to(dtype)
    w = torch.where(w < 0, torch.nan, w)
    # By the largest first, which the derivative may ignore, so that no sum overflows.
    largest = w.detach().amax(-1, keepdim=True)
    w = w / torch.where(largest == 0, 1.0, largest)
    total = w.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, w / torch.where(total == 0, 1.0, total))


def without_outliers(x: Tensor, weights: Tensor) -> Tensor:
    """``x`` with zeros for what a mask hides: positions of weight zero may hold anything, NaN included.

    Under weights that are numbers, a feature of ordinary size stays, since the derivative with respect
    to its weight depends on it.
    """
    hidden_B1n = (weights == 0).unsqueeze(1)
    if weights.dtype == torch.bool:
        return x.masked_fill(hidden_B1n, 0.0)
    size_BCn = x.detach().abs()
    largest_B11 = size_BCn.masked_fill(hidden_B1n, 0.0).amax((1, 2), keepdim=True)
    return x.masked_fill(hidden_B1n & ~(size_BCn < OUTLIER * largest_B11), 0.0)
