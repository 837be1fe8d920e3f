"""Rows of float32 in a .npy file, read and written by number without mapping the file into memory.

Pages of a mapped file count as memory of the process that touched them. Plain reads do not, so what is held
is what was asked for, however many rows the file has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

ITEM = 4


class RowFile:
    """A matrix on disk; ``numpy.load(path, mmap_mode="r")`` reads it too.

    Args:
        path: of a file that :meth:`create` made.

    Attributes:
        rows: how many there are.
        columns: the length of each.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        mapped = npy.open_memmap(self.path, mode="r")
        if mapped.ndim != 2 or mapped.dtype != np.float32 or not mapped.flags.c_contiguous:
            raise ValueError(f"{path} is no matrix of float32, row by row")
        self.rows, self.columns = int(mapped.shape[0]), int(mapped.shape[1])
        self._start = int(mapped.offset)

    @classmethod
    def create(cls, path: str | Path, rows: int, columns: int) -> RowFile:
        """A new file of zeros, which take no room on most disks until they are written."""
        npy.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, columns))
        return cls(path)

    def read(self, numbers: Iterable[int]) -> NDArray[np.float32]:
        """The rows of these numbers, in their order."""
        wanted = list(numbers)
        found = np.empty((len(wanted), self.columns), dtype=np.float32)
        with self.path.open("rb", buffering=0) as file:
            for row, number in zip(found, wanted, strict=True):
                file.seek(self._offset(number))
                if file.readinto(row.data) != row.nbytes:
                    raise OSError(f"{self.path} is cut short: delete it, and have it made anew")
        return found

    def write(self, numbers: Iterable[int], rows: NDArray[np.float32]) -> None:
        """Put rows in their places."""
        with self.path.open("r+b", buffering=0) as file:
            for number, row in zip(numbers, np.ascontiguousarray(rows, dtype=np.float32), strict=True):
                file.seek(self._offset(number))
                if file.write(row.data) != row.nbytes:
                    raise OSError(f"{self.path} could not be written: is the disk full?")

    def sync(self) -> None:
        """Return when what was written is on the disk."""
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())

    def _offset(self, number: int) -> int:
        if not 0 <= number < self.rows:
            raise IndexError(f"there are {self.rows} rows; got {number}")
        return self._start + int(number) * self.columns * ITEM
