"""Find training images whose label is probably wrong, and write a table of labels to correct.

The prediction of an image comes from a solution without it. It contradicts the label the more, the more
probable it is relative to the label.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import ImageFiles, ImageSet
from covpool.storage.files import replace_file
from covpool.training.metrics import Predictions
from covpool.training.report.rendering import Tile, thumbnail
from covpool.training.run_folder import csv_bytes

FILE = "labels.csv"
COLUMNS = ("path", "label", "split", "suggested", "probability")
# Images in the report.
SHOWN = 12


@dataclass(frozen=True, eq=False)
class Suspects:
    """Training images that a solution without them assigns to another class, the most doubtful first.

    Attributes:
        images: the training images.
        found: their predictions, each by a solution that has not seen the image.
    """

    images: ImageSet
    found: Predictions

    @property
    def order(self) -> NDArray[np.int64]:
        """The numbers of the rows of ``found``, the largest ratio of the two probabilities first."""
        wrong = np.flatnonzero(self.found.labels != self.found.predicted)
        tiny = np.finfo(np.float32).tiny
        ratio = self.found.confidence[wrong] / np.maximum(self.found.label_confidence[wrong], tiny)
        return wrong[np.argsort(-ratio, kind="stable")]

    def tiles(self) -> list[Tile]:
        """Return the first of them, with pictures."""
        classes, found = self.images.classes, self.found
        return [
            Tile(
                self.images.name(int(found.ids[i])),
                classes[found.labels[i]],
                classes[found.predicted[i]],
                float(found.confidence[i]),
                thumbnail(self.images, int(found.ids[i])),
            )
            for i in self.order[:SHOWN].tolist()
        ]

    def write_table(self, sets: Mapping[str, ImageSet], folder: Path) -> bool:
        """Write all images and their labels, these first, and return whether the images are files."""
        if not all(isinstance(images, ImageFiles) for images in sets.values()):
            return False
        replace_file(folder / FILE, csv_bytes(COLUMNS, list(self._rows(sets))))
        return True

    def _rows(self, sets: Mapping[str, ImageSet]) -> Iterator[Sequence[object]]:
        classes, found, order = self.images.classes, self.found, self.order
        for i in order.tolist():
            suggested, sure = classes[found.predicted[i]], f"{found.confidence[i]:.3f}"
            yield *_named(self.images, int(found.ids[i])), "train", suggested, sure
        doubted = set(found.ids[order].tolist())
        for split, images in sets.items():
            for i in range(len(images)):
                if split != "train" or i not in doubted:
                    yield *_named(images, i), split, "", ""


def _named(images: ImageSet, i: int) -> tuple[str, str]:
    assert isinstance(images, ImageFiles)
    return os.path.abspath(os.path.join(images.root, images.name(i))), images.classes[images.label(i)]
