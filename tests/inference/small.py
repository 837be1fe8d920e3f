"""Small images, and functions to read rows back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from PIL import Image

from tests.data.pictures import encode

CLASSES = ["auk", "bee", "cat", "dog", "elk", "fox"]
Row = dict[str, Any]


@cache
def picture(number: int) -> bytes:
    """Return a JPEG in random colors, slightly larger than the image size of the network."""
    chance = np.random.default_rng(number)
    coarse = Image.fromarray(chance.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    return encode(coarse.resize((84, 72)), "JPEG", quality=85)


def broken(number: int) -> bytes:
    return (b"", b"no image at all", picture(number)[:-200])[number % 3]


def pictures(count: int, bad_every: int = 7) -> dict[str, bytes]:
    """Return files by name; some are broken, and some are in folders."""
    return {
        f"{'more/' if i % 3 == 0 else ''}{i:05d}.jpg": broken(i) if i % bad_every == 5 else picture(i)
        for i in range(count)
    }


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_links(folder: Path, count: int, different: int = 500) -> Path:
    """Write many hard links to a few images, which take little disk space; one in fifty is broken."""
    originals = write_folder(folder.with_name("originals"), {str(i): picture(i) for i in range(different)})
    for i in range(0, different, 50):
        (originals / str(i)).write_bytes(broken(i))
    folder.mkdir()
    for i in range(count):
        os.link(originals / str(i * 7919 % different), folder / f"{i:07d}.jpg")
    return folder


def rows_of(out: Path) -> list[Row]:
    """Return all rows, in the order of the file names."""
    files = sorted(path for path in out.iterdir() if path.suffix in (".parquet", ".csv"))
    return [row for file in files for row in read_table(file).to_pylist()]


def read_table(file: Path) -> pa.Table:
    if file.suffix == ".parquet":
        return pq.read_table(file)
    strings = {"id": pa.string(), "error": pa.string()}
    options = pyarrow.csv.ConvertOptions(column_types=strings, strings_can_be_null=True)
    return pyarrow.csv.read_csv(file, convert_options=options)


def ids(rows: Sequence[Row]) -> list[str]:
    return [row["id"] for row in rows]


def hidden(folder: Path) -> list[str]:
    """Return the names of leftover temporary files."""
    return [path.name for path in folder.iterdir() if "saving" in path.name]
