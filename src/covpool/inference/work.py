"""Units of bulk inference: decode a batch, run the network, write the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import v2

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.remote import cannot_go_on
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.device import autocast
from covpool.errors import BadImageError, UsageError
from covpool.inference.options import Format
from covpool.inference.output import Place
from covpool.inference.tasks import Columns, Task, write_table
from covpool.models.bundle import load_model, read_card


@dataclass(frozen=True)
class Unit:
    """A range of images whose rows go into one file.

    Attributes:
        name: of that file, without its extension.
        start: the first image.
        stop: one past the last.
    """

    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def parts(self, size: int) -> Iterator[range]:
        """The mini-batches: they never reach from one unit into another, so rows depend on no neighbour."""
        for start in range(self.start, self.stop, size):
            yield range(start, min(start + size, self.stop))


def divide(images: ImageSet, rows: int) -> list[Unit]:
    """The units of some images: a group each, or several where a group has more than ``rows``."""
    units: list[Unit] = []
    start = 0
    for group in images.groups(rows):
        stop = start + group.images
        for first in range(start, stop, rows):
            name = f"{len(units):07d}-{group.name}" if group.name else f"{len(units):07d}"
            units.append(Unit(name, first, min(first + rows, stop)))
        start = stop
    return units


Batch = dict[str, Any]


class Decoder:
    """Makes pixels of bytes as a network's evaluation does, up to where values become floats.

    Pixels stay bytes on their way from process to process, a quarter of what floats would take.

    Args:
        preprocessing: what the network wants.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.size = preprocessing.size
        *pixels, self.to_float, self.normalize = evaluation_transform(preprocessing).transforms
        self.pixels = v2.Compose(pixels)

    def __call__(self, data: bytes) -> Tensor:
        """Bytes of a file to ``(3, size, size)`` from 0 to 255.

        Raises:
            BadImageError: with what is wrong with it.
        """
        pixels: Tensor = self.pixels(decode(data))
        return pixels

    def floats(self, pixels_B3HW: Tensor) -> Tensor:
        """What the network receives."""
        images: Tensor = self.normalize(self.to_float(pixels_B3HW))
        return images

    def batch(self, images: ImageSet, numbers: range) -> Batch:
        """Columns ``id``, ``image`` and ``error``, a row an image; of a bad one the pixels are zeros.

        Raises:
            ShardError: where nothing can be read any more.
        """
        pixels = torch.zeros(len(numbers), 3, self.size, self.size, dtype=torch.uint8)
        ids = np.empty(len(numbers), dtype=object)
        errors = np.full(len(numbers), "", dtype=object)
        for row, i in enumerate(numbers):
            ids[row] = _id(images, i)
            try:
                pixels[row] = self(images.read(i))
            except BadImageError as error:
                errors[row] = f"{error.reason}: {error}"
            except OSError as error:
                errors[row] = f"unreadable: {error.strerror or error}"
        return {"id": ids, "image": pixels, "error": errors}


def _id(images: ImageSet, i: int) -> str:
    """An image's name. Where it is in a file with others, that file may be gone."""
    try:
        name = images.name(i)
    except OSError as error:
        raise cannot_go_on(error.filename or f"image {i}", error) from error
    # The bytes of a file's name need not be UTF-8, those of a text in a table must.
    return name.encode("utf-8", "backslashreplace").decode()


# The error of a row whose numbers would say nothing.
NOT_FINITE = "not finite: the numbers of this image are too large for their type, or no numbers at all"


class Predictor:
    """From a batch of pixels to rows; ``ray.data.Dataset.map_batches`` takes it as it is.

    Args:
        bundle: the folder of a model.
        task: what is wanted.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
        sha256: of the weights that are meant. A process may be started long after the job, and a bundle be
            replaced meanwhile.
    """

    def __init__(
        self, bundle: str | Path, task: Task, device: str = "auto", sha256: str | None = None
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device is cuda, but torch sees no GPU here: pass cpu")
        self.device, self.task = torch.device(device), task
        model = load_model(bundle, device=self.device)
        if sha256 is not None and read_card(bundle).sha256 != sha256:
            raise UsageError(f"{bundle} is not the bundle any more that the job began with")
        self.decoder = Decoder(Preprocessing.of(model.pretrained_cfg))
        # Convolutions are quicker where the channels of a pixel lie together.
        self.outputs = task.start(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]

    def __call__(self, batch: Batch) -> Columns:
        """The rows of a batch.

        Args:
            batch: as :meth:`covpool.inference.work.Decoder.batch` makes it.

        Returns:
            ``id``, the columns of the task, and ``error``, which is ``""`` where there was none.
        """
        good = np.flatnonzero(batch["error"] == "")
        columns, errors = self.outputs.empty(len(batch["id"])), batch["error"].copy()
        if len(good):
            pixels = torch.as_tensor(batch["image"][good])
            made = self.outputs.columns(self._vectors(pixels))
            finite = _finite_rows(made, len(good))
            errors[good[~finite]] = NOT_FINITE
            for name, values in made.items():
                columns[name][good[finite]] = values[finite]
        return {"id": batch["id"], **columns, "error": errors}

    @torch.inference_mode()
    def _vectors(self, pixels: Tensor) -> Tensor:
        images = self.decoder.floats(pixels.to(self.device, non_blocking=True))
        images = images.contiguous(memory_format=torch.channels_last)
        with autocast(self.device, self.task.precision):
            vectors = self.outputs.forward(images).float()
            if self.task.flip:
                vectors = (vectors + self.outputs.forward(images.flip(-1)).float()) / 2
        return vectors


def _finite_rows(columns: Columns, count: int) -> NDArray[np.bool_]:
    """Which rows have none but finite numbers."""
    finite = np.ones(count, dtype=bool)
    for values in columns.values():
        if values.dtype.kind == "f":
            finite &= np.isfinite(values.reshape(count, -1)).all(axis=1)
    return finite


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Writer:
    """Writes the rows of a unit.

    Attributes:
        place: where to.
        format: of the file.
    """

    place: Place
    format: Format

    def file(self, unit: Unit) -> str:
        """The name of a unit's file."""
        return f"{unit.name}.{self.format}"

    def __call__(self, unit: Unit, parts: Sequence[Columns]) -> None:
        """Write all rows of a unit at once."""
        self.place.write(self.file(unit), write_table(parts, self.format))


@dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
        images: all of the input.
        units: those that are not done yet.
        decoder: from bytes to pixels.
        make_predictor: makes the function from pixels to rows, once in each process that has a network.
        writer: of the rows.
    """

    images: ImageSet
    units: Sequence[Unit]
    decoder: Decoder
    make_predictor: Callable[[], Callable[[Batch], Columns]]
    writer: Writer


def bad_rows(rows: Columns) -> int:
    """How many have an error."""
    return int((rows["error"] != "").sum())
