"""Grids of options: the full product in the slow tests, every pair of values in the fast tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def grid(few: Mapping[str, Sequence[Any]], **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize over the full product, and mark cases outside a pairwise cover as slow.

    The fast cases already find an error in one option or in a pair of options. ``few`` limits an axis of the
    fast cases to some of its values. Use it where the other values run the same code.
    """
    cases = list(product(*axes.values()))
    fast = set(_pairwise_cover(list(product(*(few.get(name, values) for name, values in axes.items())))))
    marked = [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(",".join(axes), marked)


def _pairwise_cover(cases: list[Case]) -> list[Case]:
    """Return a small subset, chosen greedily, in which every pair of values of two axes occurs."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
