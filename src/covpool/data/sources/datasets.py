"""Objects of Hugging Face's ``datasets`` in memory: a ``Dataset``, or a ``DatasetDict`` with one per split.

They are recognized by their methods, so this needs no import of ``datasets``. Images are read as they are
stored, without decoding. To train by a command, write the rows to Parquet: ``dataset.to_parquet``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import BaseSet, digest_of
from covpool.data.sources import SPLIT_OF, Split, sort_classes
from covpool.data.sources.parquet import LABEL, NO_LABEL
from covpool.data.sources.parquet_file import image_columns, image_value
from covpool.errors import BadImageError, UsageError
from covpool.storage.address import read_image


def is_dataset(data: object) -> bool:
    """Return whether this is a ``Dataset``, or a dict of some."""
    dataset = next(iter(data.values()), None) if isinstance(data, Mapping) else data
    return all(hasattr(dataset, name) for name in ("features", "with_format", "select_columns"))


def open_dataset(data: Any) -> dict[Split, DatasetImages]:
    """Open the splits of a ``DatasetDict``; a ``Dataset`` alone is train.

    Raises:
        UsageError: if there are no images or labels, or a split has an unknown name.
    """
    named = data if isinstance(data, Mapping) else {"train": data}
    if unknown := [name for name in named if name.lower() not in SPLIT_OF]:
        raise UsageError(f"{unknown[0]!r} is not a split: name it train, validation or test")
    return {SPLIT_OF[name.lower()]: DatasetImages(dataset) for name, dataset in named.items()}


class DatasetImages(BaseSet):
    """The rows of a ``Dataset`` with the columns ``image`` and ``label``."""

    def __init__(self, dataset: Any, labeled: bool = True) -> None:
        self.rows = dataset.with_format("arrow")
        schema = self.rows[:0].schema
        self.image = image_columns("the data set", schema)[0]
        if labeled and LABEL not in schema.names:
            raise UsageError(
                f"the data set has no column {LABEL!r}; its columns are {', '.join(schema.names)}"
            )
        self.names = tuple(map(str, getattr(dataset.features.get(LABEL), "names", None) or ()))
        self.labeled = labeled

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _labels(self) -> tuple[tuple[str, ...], NDArray[np.int32] | None]:
        if not self.labeled:
            return (), None
        values = self.rows.select_columns([LABEL])[:].column(LABEL).to_pylist()
        if None in values or (self.names and NO_LABEL in values):
            raise UsageError("the data set has rows without a label: remove them, with filter()")
        if self.names:
            return self.names, np.array(values, dtype=np.int32)
        classes = sort_classes(set(map(str, values)))
        numbers = {name: i for i, name in enumerate(classes)}
        return classes, np.array([numbers[str(value)] for value in values], dtype=np.int32)

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""
        return self._labels[0]

    @property
    def labels(self) -> NDArray[np.int32] | None:
        """The class of each row."""
        return self._labels[1]

    def name(self, i: int) -> str:
        """Return the number of the row."""
        return f"row {i}"

    def read(self, i: int) -> bytes:
        """Return the bytes in the row, or those of the file that it names."""
        if not 0 <= i < len(self):
            raise IndexError(f"there are {len(self)} rows; got {i}")
        image, path = image_value(self.rows[i : i + 1].column(self.image)[0])
        if image is not None:
            return image
        if path is None:
            raise BadImageError("unreadable", "the row has no image")
        return read_image(str(Path(path)))

    def fingerprint(self) -> str:
        """Return a hash of the classes, the labels, and the data set's own fingerprint."""
        labels = b"" if self.labels is None else self.labels.tobytes()
        return digest_of(self.classes, labels, str(getattr(self.rows, "_fingerprint", "")).encode())
