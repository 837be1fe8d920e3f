"""Open a Parquet file, and read its columns within a limit of memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covpool.errors import ShardError, UsageError
from covpool.storage.address import Address

BYTES = ("image", "bytes")
# The memory of a row group, unless the file states more, and the rows that are decoded at once.
MAX_DECODED_BYTES, MAX_BATCH_ROWS = 1 << 29, 1 << 16


@contextmanager
def open_parquet(root: Address, name: str) -> Iterator[tuple[Any, Any]]:
    """Open a file for reading, and for pyarrow."""
    try:
        import pyarrow as pa  # here, because folders are opened without it
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise UsageError("Parquet files need pyarrow: pip install 'covpool[eval]'") from error
    where = root.below(name)
    try:
        with where.opened() as file, pq.ParquetFile(file) as parquet:
            yield file, parquet
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:  # names or texts may not be UTF-8
        raise ShardError(f"{where.url} is not a Parquet file, or is truncated: {error}") from error
    except OSError as error:  # from pyarrow too if a page is damaged, without a file name
        raise ShardError(f"{where.url} cannot be read: {error.strerror or error}") from error


def read_rows(parquet: Any, number: int, column: str, where: str) -> Any:
    """Return a column of a row group. A few bytes can stand for gigabytes, so it is read in small batches.

    Raises:
        ShardError: if the column takes much more memory than the file states.
    """
    import pyarrow as pa

    group = parquet.metadata.row_group(number)
    chunks = (group.column(k) for k in range(group.num_columns))
    stated = sum(
        chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column
    )
    # A value has at most the stated bytes, so a batch of this many rows stays within the limit.
    rows = max(1, min(MAX_BATCH_ROWS, MAX_DECODED_BYTES // max(stated, 1)))
    parts, total, limit = [], 0, max(MAX_DECODED_BYTES, 2 * stated)
    # Without threads, which a forked process would lack.
    for batch in parquet.iter_batches(rows, [number], [column], use_threads=False):
        total += batch.nbytes
        if total > limit:
            raise ShardError(f"{where} decodes to more than {limit:,} bytes in a row group: it is not read")
        parts.append(batch.column(0))
    return pa.chunked_array(parts, parquet.schema_arrow.field(column).type)


def image_value(scalar: Any) -> tuple[bytes | None, str | None]:
    """Return the bytes and the path in a row."""
    value = scalar.as_py()
    image, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, value)
    return image if isinstance(image, bytes) else None, path if isinstance(path, str) else None


def has_bytes(group: Any, image: str) -> bool:
    """Return whether the statistics of a row group say that every row has the bytes of an image."""
    for column in (group.column(k) for k in range(group.num_columns)):
        if column.path_in_schema in (image, f"{image}.bytes"):
            statistics = column.statistics
            return bool(statistics and statistics.has_null_count and not statistics.null_count)
    return False


def read_footer(file: Any) -> bytes:
    """Return the footer; its length and four letters come after it."""
    file.seek(-8, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    file.seek(-8 - length, os.SEEK_END)
    footer: bytes = file.read(length)
    return footer


def image_columns(name: str, schema: Any) -> tuple[str, str | None]:
    """Return the column of images, and the column of ids if there is one."""
    image = next((column for column in (*BYTES, "path") if column in schema.names), None)
    if image is None:
        raise UsageError(
            f"{name} has no column 'image', 'bytes' or 'path'; its columns are {', '.join(schema.names)}"
        )
    kind = schema.field(image).type
    if not (is_text(kind) or (image in BYTES and re.match("struct|binary|large_binary", str(kind)))):
        raise UsageError(f"{name} has {kind} in its column {image!r}: use the bytes of images, or paths")
    ids = next((column for column in ("id", "path") if column in schema.names and column != image), None)
    return image, ids


def is_text(kind: Any) -> bool:
    """Return whether a column has texts."""
    return str(kind) in ("string", "large_string")
