"""Millions of names in little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

# Names of files need not be UTF-8: what is not goes into a str and comes out of it unharmed.
ENCODING, ERRORS = "utf-8", "surrogateescape"


class Names(Sequence[str]):
    """A sequence of names, kept as one run of bytes and the numbers where each name ends.

    A list of strings takes up to twice the memory. And forked processes that only read it would copy all of
    it in time, since Python counts the references to each string in the string.

    Args:
        names: the names, in order; they are consumed as they come.

    Example:
        >>> names = Names(f"{i}.jpg" for i in range(1000))
        >>> len(names), names[0], names[-1], list(names[2:4])
        (1000, '0.jpg', '999.jpg', ['2.jpg', '3.jpg'])
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.joined = bytearray()
        self.ends: NDArray[np.int64] = np.fromiter(self._append(names), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Names: ...

    def __getitem__(self, index: int | slice) -> str | Names:
        if isinstance(index, slice):
            return self._slice(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} names; got {index}")
        index %= len(self)
        start = self.ends[index - 1] if index else 0
        return self.joined[start : self.ends[index]].decode(ENCODING, ERRORS)

    def take(self, indices: Iterable[int]) -> Names:
        """The names at some places."""
        return Names(self[int(index)] for index in indices)

    def _slice(self, places: range) -> Names:
        if places.step != 1 or not places:
            return self.take(places)
        part = Names()
        start = int(self.ends[places.start - 1]) if places.start else 0
        part.ends = self.ends[places.start : places.stop] - start
        part.joined = self.joined[start : self.ends[places.stop - 1]]
        return part

    def __repr__(self) -> str:
        return f"<{len(self)} names>"

    def _append(self, names: Iterable[str]) -> Iterator[int]:
        for name in names:
            self.joined += name.encode(ENCODING, ERRORS)
            yield len(self.joined)
