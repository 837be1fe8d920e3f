"""Bulk inference on this machine: decode a batch, run the network, write the rows of a unit.

A worker decodes complete units, so no two workers open the same tar or row group, and it starts the next unit
while the last one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.loader import Failure
from covpool.data.look import content_number
from covpool.data.transforms import Preprocessing, pixels_transform
from covpool.device import chosen_device
from covpool.errors import BadImageError, DataError, ShardError, UnreachableError, UsageError
from covpool.inference import Running
from covpool.inference.forward import Forward, open_bundle
from covpool.inference.tasks import UNREACHABLE, Columns, Task, start_task
from covpool.inference.workers import Guard, Job, in_processes
from covpool.models.bundle import read_card
from covpool.storage.manifest import Part
from covpool.storage.remote import Requests, cannot_go_on


@dataclass(frozen=True)
class Unit:
    """A range of images whose rows go into one file.

    Attributes:
        name: the name of the file, without its extension.
        start: the index of the first image.
        stop: one past the last image.
        only: the images whose rows are computed again; empty for all.
    """

    name: str
    start: int
    stop: int
    only: tuple[int, ...] = ()

    @property
    def numbers(self) -> Sequence[int]:
        """The indices of the images to compute."""
        return self.only or range(self.start, self.stop)

    def __len__(self) -> int:
        return len(self.numbers)

    def parts(self, size: int) -> Iterator[Sequence[int]]:
        """Yield the batches; a batch never spans two units, so rows do not depend on other units."""
        for start in range(0, len(self), size):
            yield self.numbers[start : start + size]


def divide(images: ImageSet, rows: int) -> list[Unit]:
    """Return the units of some images: one per group, or several if a group has more than ``rows``."""
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
    """Decode images to pixels in uint8, as evaluation does; pixels are small to send between processes.

    Args:
        preprocessing: the preprocessing of the network.
        with_content: add a column ``content``, which identifies the bytes of each image.
        timeout: seconds to decode an image in a worker process; the main process has no such limit.
    """

    def __init__(
        self, preprocessing: Preprocessing, with_content: bool = False, timeout: float = Requests.timeout
    ) -> None:
        self.size, self.with_content, self.timeout = preprocessing.size, with_content, timeout
        self.pixels = pixels_transform(preprocessing)

    def __call__(self, data: bytes) -> Tensor:
        """Return the pixels ``(3, size, size)`` of the bytes of a file.

        Raises:
            BadImageError: if the image is unreadable.
        """
        pixels: Tensor = self.pixels(decode(data))
        return pixels

    def batch(
        self,
        images: ImageSet,
        numbers: Sequence[int],
        out: Tensor | None = None,
        guard: Guard = nullcontext,
    ) -> Batch:
        """Return the columns ``id``, ``image`` and ``error``; unreadable images have zeros as pixels.

        With ``with_content`` there is a column ``content`` too, 0 for unreadable images.

        Args:
            images: the set.
            numbers: the indices of the images.
            out: a tensor for the pixels, of at least as many images; a new one if not given.
            guard: a context in which an image, given by its index, is decoded; by default it has no deadline.

        Raises:
            ShardError: if the whole input became unreadable.
        """
        if out is None:
            out = torch.empty(len(numbers), 3, self.size, self.size, dtype=torch.uint8)
        pixels = out[: len(numbers)].zero_()
        ids = np.empty(len(numbers), dtype=object)
        errors, content = np.full(len(numbers), "", dtype=object), np.zeros(len(numbers), dtype=np.int64)
        for row, i in enumerate(numbers):
            ids[row] = image_id(images, i)
            try:
                data = images.read(i)
                with guard(i):
                    pixels[row] = self(data)
                if self.with_content:
                    content[row] = content_number(data)
            except BadImageError as error:
                errors[row] = f"{error.reason}: {error}"
            except UnreachableError as error:
                errors[row] = f"{UNREACHABLE}{error}"
            except OSError as error:
                errors[row] = f"unreadable: {error.strerror or error}"
        batch = {"id": ids, "image": pixels, "error": errors}
        return batch | {"content": content} if self.with_content else batch


def image_id(images: ImageSet, i: int) -> str:
    """Return the name of an image. The shard that contains the name may be gone."""
    try:
        name = images.name(i)
    except OSError as error:
        raise cannot_go_on(error.filename or f"image {i}", error) from error
    # File names need not be UTF-8, texts in a table must be.
    return name.encode("utf-8", "backslashreplace").decode()


# The error of a row whose values are not finite.
NOT_FINITE = "not finite: the numbers of this image are too large for their type, or no numbers at all"


class Predictor:
    """Compute the rows of a batch of pixels; also a function for ``ray.data.Dataset.map_batches``.

    Args:
        bundle: the folder of a model.
        task: computes the columns.
        device: one of :data:`covpool.device.DEVICES`; ``"auto"`` is a GPU if there is one.
        sha256: the hash of the weights. A process may start long after the job, when the bundle was replaced.
        pad_to: number of images to pad every batch to. A vector then does not depend on its batch.
        compile: compile the network; needs ``pad_to``.
    """

    def __init__(
        self,
        bundle: str | Path,
        task: Task,
        device: str = "auto",
        sha256: str | None = None,
        pad_to: int = 0,
        compile: bool = False,
    ) -> None:
        on = chosen_device(device)
        model = open_bundle(str(bundle), on)
        if sha256 is not None and read_card(bundle).sha256 != sha256:
            raise UsageError(f"{bundle} is not the bundle any more that the job began with")
        outputs = self.outputs = start_task(task, model)
        forward = torch.compile(outputs.forward, options={"freezing": True}) if compile else outputs.forward
        self.forward = Forward(
            model,
            lambda images: {"values": forward(images)},
            device=on,
            precision=task.precision,
            views="flip" if task.flip else "one",
            preprocessing=Preprocessing.of(model.pretrained_cfg),
            pad_to=pad_to,
        )

    def __call__(self, batch: Batch) -> Columns:
        """Return ``id``, the columns of the task, and ``error``, which is ``""`` for usable images.

        A column ``content`` is passed on.

        Args:
            batch: the columns of :meth:`Decoder.batch`.
        """
        good = np.flatnonzero(batch["error"] == "")
        columns, errors = self.outputs.empty(len(batch["id"])), batch["error"].copy()
        if len(good):
            values = self.forward(torch.as_tensor(batch["image"][good]))["values"]
            computed = self.outputs.columns(values.mean(dim=0))
            finite = _finite_rows(computed, len(good))
            errors[good[~finite]] = NOT_FINITE
            for name, values in computed.items():
                columns[name][good[finite]] = values[finite]
        passed_on = {"content": batch["content"]} if "content" in batch else {}
        return {"id": batch["id"], **passed_on, **columns, "error": errors}


def _finite_rows(columns: Columns, count: int) -> NDArray[np.bool_]:
    """Return which rows have only finite values."""
    finite = np.ones(count, dtype=bool)
    for values in columns.values():
        if values.dtype.kind == "f":
            finite &= np.isfinite(values.reshape(count, -1)).all(axis=1)
    return finite


Progress = Callable[[int, int], None]


class Writer(Protocol):
    """Writes the rows of a unit; see :class:`covpool.inference.bulk.TableWriter`."""

    def __call__(self, unit: Unit, parts: Sequence[Columns]) -> dict[str, Part]:
        """Write all rows of a unit at once, and return the entry of the manifest."""


@dataclass(frozen=True)
class Work:
    """A job for an engine.

    Attributes:
        images: the whole input.
        units: the units that are not done yet.
        decoder: from bytes to pixels.
        make_predictor: makes the function from pixels to rows, once in each process that has a network.
        writer: writes the rows.
        add: called with the entry of each file that is written.
    """

    images: ImageSet
    units: Sequence[Unit]
    decoder: Decoder
    make_predictor: Callable[[], Callable[[Batch], Columns]]
    writer: Writer
    add: Callable[[Mapping[str, Part]], None] = lambda parts: None


def bad_rows(rows: Columns) -> int:
    """Return how many rows have an error."""
    return int((rows["error"] != "").sum())


class Piece(NamedTuple):
    """A batch to decode."""

    unit: Unit
    numbers: Sequence[int]


def run_local(work: Work, running: Running, progress: Progress) -> int:
    """Do the work: processes decode, this one computes, a thread writes. Return the number of bad images.

    Raises:
        DataError: if the whole input became unreadable.
        OSError: if the rows cannot be written.
    """
    predictor = work.make_predictor()
    total, done, bad = sum(map(len, work.units)), 0, 0
    unfinished: dict[str, list[Columns]] = {}
    with ThreadPoolExecutor(1) as thread:
        writing: Future[dict[str, Part]] | None = None
        for (unit, numbers), batch in decoded_batches(work.images, work.units, work.decoder, running):
            rows = predictor(batch)
            unfinished.setdefault(unit.name, []).append(rows)
            done, bad = done + len(numbers), bad + bad_rows(rows)
            if numbers[-1] == unit.numbers[-1]:
                if writing is not None:
                    work.add(writing.result())  # one at a time: waiting rows take memory
                writing = thread.submit(work.writer, unit, unfinished.pop(unit.name))
            progress(done, total)
        if writing is not None:
            work.add(writing.result())
    return bad


def decoded_batches(
    images: ImageSet, units: Sequence[Unit], decoder: Decoder, running: Running
) -> Iterator[tuple[Piece, Batch]]:
    """Yield the decoded batches of some units, which other processes decode.

    Raises:
        DataError: if the whole input became unreadable.
    """
    pieces = _Pieces(units, running)
    if not running.workers:
        for piece in pieces:
            if piece is not None:
                yield piece, _checked(_decode(images, decoder, piece))
        return
    shape = (running.batch_size, 3, decoder.size, decoder.size)
    handle = partial(_decode_into, images, decoder)
    job: Job[Piece, Batch | Failure] = Job(pieces, handle, shape, decoder.timeout, running.workers)
    for piece, batch, pixels in in_processes(job):
        yield piece, _checked(batch) | {"image": pixels[: len(piece.numbers)]}


def _decode(
    images: ImageSet, decoder: Decoder, piece: Piece, pixels: Tensor | None = None, guard: Guard = nullcontext
) -> Batch | Failure:
    try:
        return decoder.batch(images, piece.numbers, pixels, guard)
    except ShardError as error:
        return Failure(str(error))


def _decode_into(
    images: ImageSet, decoder: Decoder, piece: Piece, pixels: Tensor, guard: Guard
) -> Batch | Failure:
    """Decode a batch in a worker process; its pixels are in shared memory."""
    batch = _decode(images, decoder, piece, pixels, guard)
    return batch if isinstance(batch, Failure) else {k: v for k, v in batch.items() if k != "image"}


def _checked(batch: Batch | Failure) -> Batch:
    if isinstance(batch, Failure):
        raise DataError(batch.sentence)
    return batch


class _Pieces:
    """The batches of as many units at a time as there are workers, in turn.

    Workers take them in turn too, so each decodes whole units. ``None`` fills the turns at the end.
    """

    def __init__(self, units: Sequence[Unit], running: Running) -> None:
        self.units, self.running = units, running

    def __iter__(self) -> Iterator[Piece | None]:
        waiting = iter(self.units)
        lanes = [self._lane(waiting) for _ in range(max(self.running.workers, 1))]
        return chain.from_iterable(zip_longest(*lanes))

    def _lane(self, waiting: Iterator[Unit]) -> Iterator[Piece]:
        for unit in waiting:
            for numbers in unit.parts(self.running.batch_size):
                yield Piece(unit, numbers)
