"""Numbers that sum the eigenvalues of a covariance up."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

Figures = dict[str, float | None]


def summed_up(values: Tensor) -> Figures:
    """Condition number over the part that is not zero, and effective rank.

    The effective rank is the exponential of the entropy of the singular values over their sum: d if all are
    equal, 1 if there is but one (O. Roy, M. Vetterli, "The Effective Rank", EUSIPCO 2007). Where values are
    negative they pass through zero somewhere, and a condition number tells nothing.
    """
    sizes = without_rounding(values.abs())
    nonzero = sizes[sizes > 0]
    if not len(nonzero):
        return {"condition": None, "effective_rank": 0.0}
    share = nonzero / nonzero.sum()
    negative = bool((values[sizes > 0] < 0).any())
    return {
        "condition": None if negative else rounded(float(nonzero.max() / nonzero.min())),
        "effective_rank": rounded(math.exp(-float((share * share.log()).sum()))),
    }


def medians(rows: list[Figures]) -> Figures:
    """Of each figure over all images; none where one image has none."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {
        key: None if None in column else rounded(statistics.median(value for value in column if value))
        for key, column in columns.items()
    }


def without_rounding(values: Tensor) -> Tensor:
    """Eigenvalues with those that are rounding beside the largest made zero.

    By the usual bound, which leaves room for what a layer makes of the rounding it was given: in double
    precision no eigenvalue of interest is near it.
    """
    tolerance = len(values) * torch.finfo(values.dtype).eps * float(values.max())
    return values.masked_fill(values <= tolerance, 0.0)


def rounded(number: float) -> float:
    """Six digits; what double precision leaves of a zero, beside values of order one, is zero."""
    return 0.0 if abs(number) < 1e-12 else float(f"{number:.6g}")
