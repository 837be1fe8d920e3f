"""Images in Parquet files, as Hugging Face writes them, with labels or without.

The column ``image`` or ``bytes`` has the bytes of each image, or a struct of ``bytes`` and ``path``; ``path``
alone names files. The column ``label`` has texts, or numbers that may have names in the metadata of Hugging
Face. Files named ``train-*.parquet``, ``validation-*.parquet`` and ``test-*.parquet``, or folders of these
names, are splits; other files belong to train. Images are read by row group.
"""

from __future__ import annotations

import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import BaseSet, Group, ImageSet, digest_of
from covpool.data.listing import check_alike, list_below
from covpool.data.sources import SPLIT_OF, SPLITS, Marks, Split, sort_classes
from covpool.data.sources.parquet_file import (
    Open,
    has_bytes,
    image_columns,
    image_value,
    is_text,
    read_footer,
    read_parquet,
    read_rows,
)
from covpool.errors import BadImageError, UsageError
from covpool.hub import HUB_DATA, download_data
from covpool.storage.address import Address
from covpool.storage.files import Digest, digest

LOGGER = logging.getLogger("covpool")
EXTENSION = ".parquet"
MARKS = Marks(endings=(EXTENSION,), in_folders=True)
LABEL = "label"
# Row groups that a process keeps in training: a window of them, unless they take more memory than this.
KEPT_GROUPS, KEPT_BYTES = 16, 1 << 29
NO_LABEL = -1
Numbers = NDArray[np.int32]


class File(NamedTuple):
    """A Parquet file, as its footer describes it.

    Attributes:
        name: its path from the root.
        digest: a hash of the footer and, if rows name files, of the folder.
        rows: the number of rows in each row group.
        image: the column of images.
        id: the column of ids, if there is one.
        footer: a hash of the footer.
        has_bytes: whether it is known that every row has the bytes of an image.
        largest: the bytes of the largest row group.
    """

    name: str
    digest: str
    rows: tuple[int, ...]
    image: str
    id: str | None
    footer: str
    has_bytes: bool
    largest: int


class RowGroup(NamedTuple):
    """A row group: the number of its file, its number in the file, its first row there, and its rows."""

    file: int
    number: int
    first: int
    rows: int


def open_unlabeled(path: str) -> ImageSet:
    """Open a file, or all files in a folder and below."""
    return open_files(*_files(path))


def open_files(root: Address, names: Sequence[str]) -> ImageSet:
    """Open Parquet files by name."""
    check_alike(root, names, EXTENSION)
    return ParquetImages(root, [_look(root, name) for name in names])


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
    """Open the labeled images of each split; a split without labels is left out.

    Raises:
        UsageError: if there are no labels, or some rows of a split have none.
    """
    root, names = _files(path)
    names = [name for name in names if name.lower().endswith(EXTENSION)]
    reader = _Classes()
    labels: dict[Split, list[Numbers]] = {}
    for name in names:
        labels.setdefault(_split(name), []).append(reader.read(root, name))
    classes, indices = reader.ordered()
    sets: dict[Split, ImageSet] = {}
    for split in (split for split in SPLITS if split in labels):
        numbers = indices[np.concatenate(labels[split])]
        missing = int((numbers == NO_LABEL).sum())
        if missing == len(numbers):
            LOGGER.warning("%s: the split %s is left out, as it has no labels", path, split)
            continue
        if missing:
            raise UsageError(f"{path} has {missing:,} rows without a label in {split}: remove them")
        files = [_look(root, name) for name in names if _split(name) == split]
        sets[split] = ParquetImages(root, files, classes, numbers)
    if not sets:
        raise UsageError(f"{path} has no labels in the column {LABEL!r}")
    return sets


class ParquetImages(BaseSet):
    """The rows of Parquet files, in the order of the files.

    Args:
        root: the folder that names start from.
        files: the files.
        classes: the name of each class; empty for images without labels.
        labels: the class of each row.
        row_groups: the row groups to use; all if not given.
    """

    def __init__(
        self,
        root: Address,
        files: Sequence[File],
        classes: tuple[str, ...] = (),
        labels: Numbers | None = None,
        row_groups: Sequence[RowGroup] | None = None,
    ) -> None:
        self.root, self.files, self.classes, self.labels = root, files, classes, labels
        self.row_groups = list(_row_groups(files)) if row_groups is None else row_groups
        self._ends = list(accumulate(group.rows for group in self.row_groups))
        largest = max((file.largest for file in files), default=0)
        kept = 1 if labels is None else max(1, min(KEPT_GROUPS, KEPT_BYTES // max(largest, 1)))
        self._images = lru_cache(kept)(lambda place: self._read_column(place, "image"))
        self._ids = lru_cache(1)(lambda place: self._read_column(place, "id"))

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetImages, (self.root, self.files, self.classes, self.labels, self.row_groups)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def name(self, i: int) -> str:
        """Return the id in the row, or the file that it names, or the file and the number of the row."""
        place, row = self._find(i)
        group = self.row_groups[place]
        file = self.files[group.file]
        name = None if file.id is None else self._ids(place)[row].as_py()
        if name is None and not file.has_bytes:
            # A path next to bytes is often only a file name, which many images share.
            image, path = image_value(self._images(place)[row])
            name = path if image is None else None
        return f"{file.name}#{group.first + row}" if name is None else str(name)

    def read(self, i: int) -> bytes:
        """Return the bytes in the row, or those of the file that it names."""
        place, row = self._find(i)
        image, path = image_value(self._images(place)[row])
        if image is not None:
            return image
        if path is None:
            raise BadImageError("unreadable", "the row has no image")
        file = self.files[self.row_groups[place].file]
        return self.root.below(file.name).parent.read_listed(path)

    def group_sizes(self) -> list[int]:
        """Return the number of rows in each row group."""
        return [group.rows for group in self.row_groups]

    def near(self, i: int) -> range:
        """Return the rows of the same row group."""
        place, row = self._find(i)
        return range(i - row, self._ends[place])

    def some(self, count: int, seed: int) -> ParquetImages:
        """Return a set of a few row groups, chosen by the seed, with at least ``count`` rows."""
        from covpool.data.order import some_groups  # here, because the import of torch takes a while

        indices = some_groups(self.group_sizes(), count, seed)
        groups = [self.row_groups[place] for place in indices]
        ends = [self._ends[place] for place in indices]
        rows = [np.arange(end - group.rows, end) for end, group in zip(ends, groups, strict=True)]
        labels = None if self.labels is None else self.labels[np.concatenate(rows)]
        return ParquetImages(self.root, self.files, self.classes, labels, groups)

    def groups(self, rows: int) -> Iterator[Group]:
        """Yield the row groups of a file, together if they have no more than ``rows`` rows."""
        for number, groups in groupby(self.row_groups, key=lambda group: group.file):
            stem, together = PurePosixPath(self.files[number].name).stem, 0
            for group in groups:
                if together and together + group.rows > rows:
                    yield Group(stem, together)
                    together = 0
                together += group.rows
            if together:
                yield Group(stem, together)

    def fingerprint(self) -> str:
        """Return a hash of the classes, and of the names, footers and row groups of the files."""
        files = [(file.name, file.footer) for file in self.files]
        return digest_of(
            self.classes, os.fsencode(repr((files, [tuple(group) for group in self.row_groups])))
        )

    def stamp(self) -> str:
        """Return a hash of the files' names, rows, columns and footers, which have sizes and statistics."""
        return digest(os.fsencode(repr([tuple(file[:5]) for file in self.files])))

    def _find(self, i: int) -> tuple[int, int]:
        """Return the place of an image's row group, and its row there."""
        if not 0 <= i < len(self):
            raise IndexError(f"there are {len(self)} rows; got {i}")
        place = bisect_right(self._ends, i)
        return place, i - self._ends[place] + self.row_groups[place].rows

    def _read_column(self, place: int, kind: str) -> Any:
        group = self.row_groups[place]
        file = self.files[group.file]
        column = file.image if kind == "image" else file.id
        return read_parquet(self.root, file.name, lambda opened: read_rows(opened, group.number, str(column)))


class _Classes:
    """The class names that files use, numbered in the order of the rows."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.names: set[tuple[str, ...]] = set()  # in the metadata of Hugging Face

    def read(self, root: Address, name: str) -> Numbers:
        """Return the labels of a file by number, with -1 for a row without a label."""

        def labels(opened: Open) -> Numbers:
            parquet = opened.parquet
            schema = parquet.schema_arrow
            if LABEL not in schema.names:
                raise UsageError(f"{name} has no column {LABEL!r}; its columns are {', '.join(schema.names)}")
            kind, names = str(schema.field(LABEL).type), _class_names(schema)
            if not re.match(r"u?int\d|string|large_string|dictionary", kind):
                raise UsageError(f"{name} has {kind} in its column {LABEL!r}: use strings or integers")
            self.names |= {names} if names else set()
            parts = [np.empty(0, dtype=np.int32)]
            for group in range(parquet.metadata.num_row_groups):
                column = read_rows(opened, group, LABEL)
                encoded = column.unify_dictionaries().combine_chunks()
                encoded = encoded if kind.startswith("dictionary") else encoded.dictionary_encode()
                known = [self._number(name, value, names) for value in encoded.dictionary.to_pylist()]
                indices = encoded.indices.fill_null(len(known)).to_numpy()
                parts.append(np.array([*known, NO_LABEL], dtype=np.int32)[indices])
            return np.concatenate(parts)

        return read_parquet(root, name, labels)

    def ordered(self) -> tuple[tuple[str, ...], Numbers]:
        """Return the classes in their order, and the place of each number; the last place is that of -1."""
        classes = next(iter(self.names)) if self.names else sort_classes(self.numbers)
        place = {name: i for i, name in enumerate(classes)}
        if len(self.names) > 1 or not self.numbers.keys() <= place.keys():
            raise UsageError("the Parquet files have different class names: write them with the same ones")
        return classes, np.array([*(place[name] for name in self.numbers), NO_LABEL], dtype=np.int32)

    def _number(self, name: str, value: Any, names: tuple[str, ...] | None) -> int:
        if names and isinstance(value, int):
            if not NO_LABEL <= value < len(names):
                raise UsageError(f"{name} has the label {value}, but only {len(names)} class names")
            if value == NO_LABEL:  # as Hugging Face writes it
                return NO_LABEL
            value = names[value]
        return self.numbers.setdefault(str(value), len(self.numbers))


def _class_names(schema: Any) -> tuple[str, ...] | None:
    """Return the class names in the metadata of Hugging Face, if there are any."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[LABEL]["names"]))
    except (ValueError, KeyError, TypeError):
        return None


def _files(path: str) -> tuple[Address, list[str]]:
    """Return the root of a path, and the names of the files there."""
    if path.startswith(HUB_DATA):
        path = str(download_data(path))
    address = Address.of(path)
    return (address, list_below(address)) if address.is_folder() else (address.parent, [address.name])


def _split(name: str) -> Split:
    """Return the split by the first word of a file's name, or by the name of its folder."""
    path = PurePosixPath(name.lower())
    words = (re.split(r"[-_.]", path.name)[0], path.parent.name)
    return next((SPLIT_OF[word] for word in words if word in SPLIT_OF), "train")


def _row_groups(files: Sequence[File]) -> Iterator[RowGroup]:
    for number, file in enumerate(files):
        first = 0
        for group, rows in enumerate(file.rows):
            yield RowGroup(number, group, first, rows)
            first += rows


def _look(root: Address, name: str) -> File:
    def look(opened: Open) -> File:
        metadata, schema = opened.parquet.metadata, opened.parquet.schema_arrow
        image, ids = image_columns(name, schema)
        groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
        footer = read_footer(opened)
        of_file, has_paths = Digest(footer), is_text(schema.field(image).type)
        if has_paths:  # the same paths in another folder are other images
            of_file.update(os.fsencode(root.below(name).parent.url))
        return File(
            name,
            of_file.hexdigest(),
            tuple(group.num_rows for group in groups),
            image,
            ids,
            digest(footer),
            not has_paths and all(has_bytes(group, image) for group in groups),
            max((group.total_byte_size for group in groups), default=0),
        )

    return read_parquet(root, name, look)
