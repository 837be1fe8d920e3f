"""Fit heads in closed form: linear classifiers from sums that add, subtract and merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.closed_form.fitting import Fitted
    from covpool.closed_form.kept import Changed
    from covpool.closed_form.options import FitOptions
    from covpool.closed_form.solve import Solution
    from covpool.closed_form.sums import Rows, Sums

__all__ = ["Changed", "FitOptions", "Fitted", "Rows", "Solution", "Sums"]

__getattr__ = lazily(
    __name__,
    "eval",
    {
        "covpool.closed_form.fitting": "Fitted",
        "covpool.closed_form.kept": "Changed",
        "covpool.closed_form.options": "FitOptions",
        "covpool.closed_form.solve": "Solution",
        "covpool.closed_form.sums": "Rows Sums",
    },
)
