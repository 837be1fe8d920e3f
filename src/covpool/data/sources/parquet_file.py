"""Open a Parquet file, and read its columns within a limit of memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from covpool.errors import CovpoolError, ShardError, UsageError
from covpool.storage.address import Address
from covpool.storage.remote import patiently

T = TypeVar("T")

BYTES = ("image", "bytes")
# The memory of a row group, unless the file states more, and the rows that are decoded at once.
MAX_DECODED_BYTES, MAX_BATCH_ROWS = 1 << 29, 1 << 16
# How many times the bytes of the file a column may take, and the largest footer.
MAX_EXPANSION, MAX_FOOTER_BYTES = 16, 1 << 27


class Open(NamedTuple):
    """An open file, for its bytes and for pyarrow."""

    file: Any
    parquet: Any
    size: int
    where: str


def read_parquet(root: Address, name: str, read: Callable[[Open], T]) -> T:
    """Open a file, and return the result of a function on it; a server that fails is asked again.

    Raises:
        ShardError: if it is not a Parquet file, or cannot be read.
    """
    try:
        import pyarrow as pa  # here, because folders are opened without it
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise UsageError("Parquet files need pyarrow: pip install 'covpool[eval]'") from error
    where = root.below(name)

    def attempt() -> T | CovpoolError:
        try:
            with where.opened() as file:
                size = file.seek(0, os.SEEK_END)
                _check_footer(file, size, where.url)
                with pq.ParquetFile(file) as parquet:
                    return read(Open(file, parquet, size, where.url))
        except CovpoolError as error:
            return error
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:  # names or texts may not be UTF-8
            return ShardError(f"{where.url} is not a Parquet file, or is truncated: {error}")

    if where.is_local:
        try:
            result = attempt()
        except OSError as error:  # from pyarrow too if a page is damaged, without a file name
            raise ShardError(f"{where.url} cannot be read: {error.strerror or error}") from error
    else:
        result = patiently(where.url, attempt, until=time.monotonic() + where.requests.table_timeout)
    if isinstance(result, CovpoolError):
        raise result
    return result


def read_rows(opened: Open, number: int, column: str) -> Any:
    """Return a column of a row group. A few bytes can stand for gigabytes, so it is read in small batches.

    Raises:
        ShardError: if the column takes much more memory than the file states.
    """
    import pyarrow as pa

    parquet = opened.parquet
    group = parquet.metadata.row_group(number)
    chunks = (group.column(k) for k in range(group.num_columns))
    stated = sum(
        chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column
    )
    # A value has at most the stated bytes, so a batch of this many rows stays within the limit.
    rows = max(1, min(MAX_BATCH_ROWS, MAX_DECODED_BYTES // max(stated, 1)))
    # The file may state too much: images take up to a few times their compressed bytes.
    parts, total, limit = [], 0, max(MAX_DECODED_BYTES, min(2 * stated, MAX_EXPANSION * opened.size))
    # Without threads, which a forked process would lack.
    for batch in parquet.iter_batches(rows, [number], [column], use_threads=False):
        total += batch.nbytes
        if total > limit:
            raise ShardError(
                f"{opened.where} decodes to more than {limit:,} bytes in a row group: it is not read"
            )
        parts.append(batch.column(0))
    return pa.chunked_array(parts, parquet.schema_arrow.field(column).type)


def _check_footer(file: Any, size: int, where: str) -> None:
    """Raise if the footer claims to be very long: it is read at once."""
    if _footer_bytes(file, size) > MAX_FOOTER_BYTES:
        raise ShardError(
            f"{where} is not a Parquet file, is truncated, or has a footer of over {MAX_FOOTER_BYTES:,} bytes"
        )
    file.seek(0)


def _footer_bytes(file: Any, size: int) -> int:
    """Return the length of the footer, which stands before the last four letters."""
    file.seek(max(size - 8, 0))
    return int.from_bytes(file.read(4), "little")


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


def read_footer(opened: Open) -> bytes:
    """Return the footer."""
    length = _footer_bytes(opened.file, opened.size)
    opened.file.seek(opened.size - 8 - length)
    footer: bytes = opened.file.read(length)
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
