"""Grids of options: all of them when there is time, every pair of values when there is little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def grid(few: Mapping[str, Sequence[Any]], **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise over the whole product; the cases outside a pairwise cover are marked slow.

    An error in the code of one option, or of two options together, fails in the fast part already. ``few``
    has the values of an axis that the fast part takes, where the others run the same code.
    """
    cases = list(product(*axes.values()))
    fast = set(_pairwise_cover(list(product(*(few.get(name, values) for name, values in axes.items())))))
    marked = [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(",".join(axes), marked)


def _pairwise_cover(cases: list[Case]) -> list[Case]:
    """A small subset in which every pair of values of two axes occurs: the greedy choice."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
