"""Names stored as bytes equal the given names."""

from __future__ import annotations

import pickle
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covpool.data.image_set import Names

# All possible file names, including bytes that are not UTF-8, as Python represents them.
FILE_NAMES = st.lists(st.binary(max_size=12).map(lambda data: data.decode("utf-8", "surrogateescape")))


@settings(deadline=None)
@given(names=FILE_NAMES, data=st.data())
def test_a_list_and_its_names_are_the_same(names: list[str], data: st.DataObject) -> None:
    compact = Names(iter(names))
    assert list(compact) == names
    assert len(compact) == len(names)
    assert [compact[i] for i in range(-len(names), 0)] == names
    chosen = data.draw(st.lists(st.integers(0, len(names) - 1))) if names else []
    assert list(compact.take(chosen)) == [names[i] for i in chosen]
    part = slice(*sorted(data.draw(st.tuples(st.integers(-5, 15), st.integers(-5, 15)))))
    for some in (part, slice(1, None, 2), slice(None, None, -1)):
        assert list(compact[some]) == names[some]
    assert list(pickle.loads(pickle.dumps(compact))) == names


@pytest.mark.parametrize("index", [2, -3])
def test_places_that_are_none(index: int) -> None:
    with pytest.raises(IndexError, match="there are 2 names"):
        Names(["a", "b"])[index]


def test_memory() -> None:
    count = 20_000
    tracemalloc.start()
    try:
        names = Names(f"train/{i % 200:03d}.Some_Kind_Of_Bird/image_{i:06d}.jpg" for i in range(count))
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    length = len(names[0])
    assert kept < count * (length + 8) * 1.2
    assert most < count * (length + 8) * 2
    assert kept < 0.7 * sum(sys.getsizeof(name) + 8 for name in names)
