"""Rows on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from covpool.inference.store import RowFile


def test_rows_come_back_by_number(tmp_path: Path) -> None:
    written = np.random.default_rng(0).standard_normal((3, 5), dtype=np.float32)
    file = RowFile.create(tmp_path / "rows.npy", 6, 5)
    file.write([4, 0, 2], written)
    assert np.array_equal(file.read([0, 2, 4, 1]), [written[1], written[2], written[0], np.zeros(5)])
    again = RowFile(tmp_path / "rows.npy")
    assert (again.rows, again.columns) == (6, 5)
    assert np.array_equal(again.read(range(6)), np.load(tmp_path / "rows.npy"))
    with pytest.raises(IndexError, match=r"^there are 6 rows; got 6"):
        again.read([6])


def test_other_files_and_those_cut_short_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "other.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"is not an array of float32"):
        RowFile(tmp_path / "other.npy")
    file = RowFile.create(tmp_path / "rows.npy", 6, 5)
    with (tmp_path / "rows.npy").open("r+b") as short:
        short.truncate(200)
    with pytest.raises(OSError, match=r"is truncated: delete it"):
        file.read(range(6))
