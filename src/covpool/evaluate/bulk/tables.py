"""Rows as the bytes of a Parquet or a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from covpool.evaluate.bulk.tasks import Columns

Format = Literal["parquet", "csv"]


def write_table(parts: Sequence[Columns], kind: Format) -> bytes:
    """The bytes of a file with the rows of some batches; beside an error all but the id is null."""
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    table = pa.table(_arrow(columns))
    stream = pa.BufferOutputStream()
    if kind == "csv":
        pyarrow.csv.write_csv(_flat(table), stream)
    else:
        # To look for numbers that come again in vectors would be in vain.
        words = [name for name in table.column_names if name != "vector"]
        pq.write_table(table, stream, use_dictionary=words)
    data: bytes = stream.getvalue().to_pybytes()
    return data


def _arrow(columns: Columns) -> dict[str, Any]:
    errors = columns["error"]
    bad = errors != ""
    made: dict[str, Any] = {}
    for name, values in columns.items():
        if name == "vector":
            made[name] = pa.FixedSizeListArray.from_arrays(
                pa.array(values.reshape(-1)), values.shape[1], mask=pa.array(bad)
            )
        elif name == "id":
            made[name] = pa.array(values, pa.string())
        else:
            kind = pa.float32() if values.dtype == np.float32 else pa.string()
            made[name] = pa.array(values, kind, mask=~bad if name == "error" else bad)
    return made


def _flat(table: pa.Table) -> pa.Table:
    """With a column for each number of a vector, for CSV knows no lists."""
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if name != "vector":
            columns[name] = column
            continue
        width = column.type.list_size
        numbers = column.values.cast(pa.float32()).to_numpy().reshape(-1, width)
        missing = column.is_null().to_numpy(zero_copy_only=False)
        for k in range(width):
            columns[f"vector{k + 1}"] = pa.array(np.ascontiguousarray(numbers[:, k]), mask=missing)
    return pa.table(columns)
