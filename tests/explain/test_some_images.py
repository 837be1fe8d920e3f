"""A few images of many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from covpool.explain.explaining import some_images
from tests.data.trees import plant


@pytest.mark.parametrize(("limit", "shown"), [(1, 1), (3, 3), (24, 24), (45, 45), (100, 45)])
def test_they_are_spread_over_the_classes(tmp_path: Path, limit: int, shown: int) -> None:
    plant(tmp_path, *(f"{name}/{number:02d}.jpg" for name in "abc" for number in range(15)))
    found = Counter(one.label for one in some_images(tmp_path, limit))
    assert sum(found.values()) == shown
    if limit >= 3:
        assert set(found.values()) == {shown // 3}
