"""Tables as bytes of a CSV; names of files that are no UTF-8 come through as they are."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from covpool.data.names import ENCODING, ERRORS


def csv_bytes(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> bytes:
    """A line for the columns and one for each row.

    Example:
        >>> csv_bytes(["name", "loss"], [["a,b", 0.5]]).splitlines()
        [b'name,loss', b'"a,b",0.5']
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode(ENCODING, ERRORS)
