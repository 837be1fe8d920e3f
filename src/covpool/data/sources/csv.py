"""A table of images: ``path,label`` and, if wanted, ``split``, in CSV with a line that names the columns.

Paths are from the folder of the file, or absolute. They may lead anywhere (``../``), since whoever writes the
table can read the files anyway. Separators are commas, semicolons or tabs. Images keep the order of the file;
classes are in the order of their names or, where all labels are whole numbers, of these.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from covpool.data.sources.listing import SPLIT_OF, SPLITS, Listing, Row, Split, make_listing
from covpool.errors import UsageError

EXTENSIONS = (".csv", ".tsv")


def recognises(path: Path) -> bool:
    """By the extension."""
    return path.suffix.lower() in EXTENSIONS and path.is_file()


def read(path: Path) -> Listing:
    """List the images.

    Raises:
        ValueError: with the line where something is wrong.
    """
    numbers: dict[str, int] = {}  # of the classes, in the order they are met
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = _separator(file.readline())
            file.seek(0)
            listing = make_listing(
                path.parent, (), _rows(path, csv.reader(file, delimiter=separator), numbers)
            )
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not in UTF-8: save it as 'CSV UTF-8'") from error
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV: {error}") from error
    classes = sorted(numbers, key=int if all(map(_is_whole, numbers)) else None)
    places = np.empty(len(classes), dtype=np.int32)
    places[[numbers[name] for name in classes]] = np.arange(len(classes))
    return Listing(listing.root, tuple(classes), listing.names, places[listing.labels], listing.split_of)


def _rows(path: Path, lines: Iterator[list[str]], numbers: dict[str, int]) -> Iterator[Row]:
    header = next(lines, [])
    columns = {name.strip().lower(): place for place, name in enumerate(header)}
    for name in ("path", "label"):
        if name not in columns:
            raise UsageError(
                f"{path} has no column {name!r}: its first line should be path,label or path,label,split; "
                f"it is {','.join(header)!r}"
            )
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        if len(line) <= max(columns.values()):
            raise UsageError(f"{path} has {len(line)} of {len(header)} columns in row {number}")
        name, label = line[columns["path"]].strip(), line[columns["label"]].strip()
        if not name or not label:
            raise UsageError(f"{path} has no {'label' if name else 'path'} in row {number}")
        split = _split(path, line[columns["split"]], number) if "split" in columns else "train"
        yield Row(split, numbers.setdefault(label, len(numbers)), name)


def _split(path: Path, word: str, number: int) -> Split:
    split = SPLIT_OF.get(word.strip().lower())
    if split is None:
        raise UsageError(f"{path} has the split {word!r} in row {number}; it takes {', '.join(SPLITS)}")
    return split


def _separator(header: str) -> str:
    return max(",;\t", key=header.count)


def _is_whole(label: str) -> bool:
    return label.removeprefix("-").isdecimal() and label.isascii()
