"""Texts in the CSV files of covpool that a spreadsheet would run as formulas."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from covpool.data.check import Problem, write_report
from covpool.data.loader import BadImage
from covpool.inference.tasks import read_rows, write_table
from covpool.training.report.record import _rows
from covpool.training.run_folder import RunFolder, csv_bytes

NAMES = [
    "=cmd|' /C calc'!A0",
    "+1",
    "-1.jpg",
    "@SUM(A1)",
    "\tx",
    "\rx",
    "x\r=1",
    "'=1",
    "''-",
    "'tis",
    "wren.jpg",
    "a=b",
]


def cells(data: bytes) -> list[str]:
    return [cell for row in csv.reader(io.StringIO(data.decode(), newline="")) for cell in row]


def test_no_cell_starts_a_formula_and_reading_gives_the_name_again(tmp_path: Path) -> None:
    data = csv_bytes(["name", "loss"], [[name, -0.5] for name in NAMES])
    (tmp_path / "table.csv").write_bytes(data)
    assert not [cell for cell in cells(data) if cell.startswith(tuple("=+@\t\r")) or cell == "-1.jpg"]
    assert [row["name"] for row in _rows(tmp_path / "table.csv")] == NAMES
    assert cells(data).count("-0.5") == len(NAMES)  # numbers stay numbers


def test_rows_of_bulk_inference() -> None:
    names = np.array(NAMES, dtype=object)
    columns = {"id": names, "class1": names[::-1].copy(), "score1": np.full(len(NAMES), -1, np.float32)}
    data, _ = write_table([columns | {"error": np.full(len(NAMES), "", dtype=object)}], "csv")
    assert not [cell for cell in cells(data) if cell.startswith(tuple("=+@\t\r")) or cell == "-1.jpg"]
    rows = read_rows(data, "csv")
    assert [row["id"] for row in rows] == NAMES
    assert [row["class1"] for row in rows] == NAMES[::-1]


def test_bad_images_and_problems(tmp_path: Path) -> None:
    bad = [BadImage(*[name] * len(BadImage._fields)) for name in NAMES]
    RunFolder(tmp_path).write_bad_images(bad)
    assert RunFolder(tmp_path).read_bad_images() == bad
    write_report([Problem(*[name] * len(Problem._fields)) for name in NAMES], tmp_path / "problems.csv")
    for name in ("bad_images.csv", "problems.csv"):
        found = cells((tmp_path / name).read_bytes())
        assert not [cell for cell in found if cell.startswith(tuple("=+-@\t\r"))]
