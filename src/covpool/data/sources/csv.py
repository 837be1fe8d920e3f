"""A table of images in CSV, with the columns ``path``, ``label`` and optionally ``split``.

Paths start from the folder of the file, or are absolute. They stay in that folder, unless the command line
has ``--trust-rows``: a table may come from somebody else. Separators are commas, semicolons or tabs. Images
keep the order of the file. Classes are sorted by name or, if all labels are whole numbers, by number. Without
labels, the column ``path`` is enough.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.listing import FileImages
from covpool.data.sources import SPLIT_OF, SPLITS, Listing, Marks, Row, Split, make_listing, sort_classes
from covpool.errors import UsageError
from covpool.storage.address import Address

MARKS = Marks(endings=(".csv", ".tsv"))
Lines = Iterator[list[str]]


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageFiles]:
    """Open the images of each split.

    Raises:
        UsageError: with the number of the row where something is wrong.
    """
    numbers: dict[str, int] = {}  # of the classes, in the order of the rows
    with _table(path) as lines:
        listing = make_listing(Path(path).parent, (), _rows(path, lines, numbers))
    classes = sort_classes(numbers)
    place = {name: i for i, name in enumerate(classes)}
    indices = np.array([place[name] for name in numbers], dtype=np.int32)
    sets = Listing(listing.root, classes, listing.names, indices[listing.labels], listing.split_of).sets()
    folder = Address.of(listing.root)
    return {split: replace(images, table=folder) for split, images in sets.items()}


def open_unlabeled(path: str) -> ImageSet:
    """Open the images in the column ``path``, local or remote."""
    with _table(path) as lines:
        rows = _records(path, lines, ("path",), "")
        return FileImages(Address.of(path).parent, (row["path"] for _, row in rows))


@contextmanager
def _table(path: str) -> Iterator[Lines]:
    try:
        text = Address.of(path).read().decode("utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        yield csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not in UTF-8: save it as 'CSV UTF-8'") from error
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV: {error}") from error


def _records(
    path: str, lines: Lines, needed: tuple[str, ...], hint: str
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of each row, and its values by column; the needed columns are not empty."""
    header = next(lines, [])
    columns = {name.strip().lower(): place for place, name in enumerate(header)}
    for name in needed:
        if name not in columns:
            raise UsageError(
                f"{path} has no column {name!r}: {hint or 'its first line'} is {','.join(header)!r}"
            )
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        if len(line) <= max(columns[name] for name in (*needed, "split") if name in columns):
            raise UsageError(f"{path} has {len(line)} of {len(header)} columns in row {number}")
        values = {name: line[place].strip() for name, place in columns.items() if place < len(line)}
        for name in needed:
            if not values[name]:
                raise UsageError(f"{path} has no {name} in row {number}")
        yield number, values


def _rows(path: str, lines: Lines, numbers: dict[str, int]) -> Iterator[Row]:
    hint = "its first line should be path,label or path,label,split; it"
    for number, values in _records(path, lines, ("path", "label"), hint):
        word = values.get("split", "train")
        split = SPLIT_OF.get(word.lower())
        if split is None:
            raise UsageError(f"{path} has the split {word!r} in row {number}; use one of {', '.join(SPLITS)}")
        yield Row(split, numbers.setdefault(values["label"], len(numbers)), values["path"])
