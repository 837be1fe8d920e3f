"""Texts in CSV that no spreadsheet runs as a formula.

A spreadsheet runs a cell that starts with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return. Names of
files and classes may come from others, so such a text gets an apostrophe in front. Reading removes it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable

# Patterns of Python and of Arrow. A text that starts with apostrophes gets one more, so both are exact.
FORMULA, WRITTEN = "^('*[=+\\-@\t\r])", "^'('*[=+\\-@\t\r])"
_FORMULA, _WRITTEN = re.compile(FORMULA), re.compile(WRITTEN)


def to_cell(value: object) -> object:
    """Return a value as it is written to CSV; numbers stay as they are.

    Example:
        >>> [to_cell(one) for one in ("=1+1", "wren", "'tis", "'=1", -0.5)]
        ["'=1+1", 'wren', "'tis", "''=1", -0.5]
    """
    return _FORMULA.sub(r"'\1", value) if isinstance(value, str) else value


def from_cell(text: str) -> str:
    """Return the text that :func:`to_cell` wrote.

    Example:
        >>> [from_cell(one) for one in ("'=1+1", "wren", "'tis", "''=1")]
        ['=1+1', 'wren', "'tis", "'=1"]
    """
    return _WRITTEN.sub(r"\1", text)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV.

    Example:
        >>> csv_text([["name", "loss"], ["a,b", -0.5], ["=1", 0]]).splitlines()
        ['name,loss', '"a,b",-0.5', "'=1,0"]
    """
    lines = _Lines()
    # With this end of a line, Python quotes carriage returns too: they end a row in a spreadsheet.
    csv.writer(lines, lineterminator="\r\n").writerows(map(to_cell, row) for row in rows)
    return "".join(lines)


class _Lines(list[str]):
    """Receives each row with its end, and ends it as on Linux."""

    def write(self, row: str) -> None:
        self.append(row.removesuffix("\r\n") + "\n")
