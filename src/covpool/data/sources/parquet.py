"""Images in Parquet files."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from covpool.data.image_set import Group
from covpool.data.remote import Address
from covpool.errors import BadImageError, ShardError, UsageError

PARQUET = ".parquet"
BYTES = ("image", "bytes")


class _File(NamedTuple):
    """What is known of a Parquet file: its name, a hash of its end, the rows of its groups, two columns."""

    name: str
    digest: str
    rows: tuple[int, ...]
    image: str
    id: str | None


class _Rows(NamedTuple):
    """A row group that has been read."""

    key: tuple[int, int]
    images: Any
    ids: Any


class ParquetImages:
    """The rows of Parquet files, in the order of the files' names.

    Args:
        root: the folder that names start from.
        names: of the files. The end of each is read at once, for the number of its rows.
    """

    def __init__(self, root: Address, names: list[str]) -> None:
        self.root = root
        self.files = [_look(root, name) for name in names]
        self._ends = list(accumulate(sum(file.rows) for file in self.files))
        self._rows: _Rows | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def name(self, i: int) -> str:
        """The id."""
        number, row = self._find(i)
        file, rows, place = self.files[number], *self._load(number, row)
        told: Any = None if rows.ids is None else rows.ids[place].as_py()
        if told is None:
            image = rows.images[place].as_py()
            if isinstance(image, dict):
                # A path beside bytes is often its end alone, which many images share.
                image = image.get("path") if image.get("bytes") is None else None
            told = image if isinstance(image, str) else None
        return f"{file.name}#{row}" if told is None else str(told)

    def read(self, i: int) -> bytes:
        """The bytes in the row, or those of the file that it names."""
        number, row = self._find(i)
        rows, place = self._load(number, row)
        value = rows.images[place].as_py()
        image, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, value)
        if isinstance(image, bytes):
            return image
        if not isinstance(path, str):
            raise BadImageError("unreadable", "the row has no image")
        return self.root.below(self.files[number].name).parent.read_listed(path)

    def groups(self, rows: int) -> Iterator[Group]:
        """Row groups of a file, as many as have no more than ``rows`` together."""
        for file in self.files:
            stem, together = PurePosixPath(file.name).stem, 0
            for count in file.rows:
                if together and together + count > rows:
                    yield Group(stem, together)
                    together = 0
                together += count
            if together:
                yield Group(stem, together)

    def fingerprint(self) -> str:
        """Of names, rows, and what the end of each file tells: where its pages begin, sizes, extremes."""
        return hashlib.sha256(os.fsencode(repr([tuple(file) for file in self.files]))).hexdigest()

    def _find(self, i: int) -> tuple[int, int]:
        """The file of an image, and its row there."""
        number = bisect_right(self._ends, i)
        return number, i - self._ends[number] + sum(self.files[number].rows)

    def _load(self, number: int, row: int) -> tuple[_Rows, int]:
        """The row group, and the row's place in it."""
        file = self.files[number]
        ends = list(accumulate(file.rows))
        group = bisect_right(ends, row)
        if self._rows is None or self._rows.key != (number, group):
            columns = [file.image] + ([file.id] if file.id else [])
            with _opened(self.root, file.name) as (_, parquet):
                # Without threads, which a forked process would lack.
                table = parquet.read_row_group(group, columns=columns, use_threads=False)
            ids = table.column(file.id) if file.id else None
            self._rows = _Rows((number, group), table.column(file.image), ids)
        return self._rows, row - ends[group] + file.rows[group]


@contextmanager
def _opened(root: Address, name: str) -> Iterator[tuple[Any, Any]]:
    """The file, and what pyarrow reads of it."""
    where = root.below(name)
    try:
        with where.open() as file, pq.ParquetFile(file) as parquet:
            yield file, parquet
    except pa.ArrowInvalid as error:
        raise ShardError(f"{where.url} is no Parquet file, or cut short: {error}") from error
    except OSError as error:  # from pyarrow too, where a page is spoiled, and then without a name
        raise ShardError(f"{where.url} cannot be read: {error.strerror or error}") from error


def _look(root: Address, name: str) -> _File:
    with _opened(root, name) as (file, parquet):
        metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = tuple(metadata.row_group(k).num_rows for k in range(metadata.num_row_groups))
        image, ids = _columns(name, schema)
        told = hashlib.sha256(_footer(file))
        if _is_text(schema.field(image).type):  # of other images, if the same paths start elsewhere
            told.update(os.fsencode(root.below(name).parent.url))
        return _File(name, told.hexdigest(), rows, image, ids)


def _footer(file: Any) -> bytes:
    """The bytes at the end that tell of all others; their length comes after them, and the four letters."""
    file.seek(-8, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    file.seek(-8 - length, os.SEEK_END)
    footer: bytes = file.read(length)
    return footer


def _columns(name: str, schema: Any) -> tuple[str, str | None]:
    """The column of images, and that of ids if there is one."""
    image = next((column for column in (*BYTES, "path") if column in schema.names), None)
    if image is None:
        raise UsageError(
            f"{name} has no column 'image', 'bytes' or 'path'; its columns are {', '.join(schema.names)}"
        )
    kind = schema.field(image).type
    if not (_is_text(kind) or (image in BYTES and (pa.types.is_struct(kind) or _is_bytes(kind)))):
        raise UsageError(f"{name} has {kind} in its column {image!r}: bytes of images or paths are wanted")
    ids = next((column for column in ("id", "path") if column in schema.names and column != image), None)
    return image, ids


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
