"""Load batches with worker processes, in training or evaluation order."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from multiprocessing.sharedctypes import RawValue
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.order import EvaluationOrder, Order, number, torch_seeded
from covpool.device import pins_memory
from covpool.errors import WORKER_DIED, BadImageError, DataError, ShardError, UsageError

Transform = Callable[[Image.Image], Tensor]

# Replacements tried for an unreadable image; the first half come from the same group (shard).
ATTEMPTS = 16


class BadImage(NamedTuple):
    """An unreadable image."""

    name: str
    reason: str
    sentence: str


class Batch(NamedTuple):
    """A batch of images.

    Attributes:
        images: ``(B, 3, height, width)``.
        labels: ``(B,)``.
        ids: ``(B,)``, the requested samples. Image and label of an unreadable sample are its replacement's.
        bad: the unreadable images.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    bad: Sequence[BadImage]


class Draw(NamedTuple):
    """A sample to load; the three fields seed its augmentation.

    Attributes:
        epoch: the epoch.
        id: the sample.
        occurrence: distinguishes repetitions of a sample within an epoch.
    """

    epoch: int
    id: int
    occurrence: int = 0


class Failure(NamedTuple):
    """The message of a :class:`DataError` in a worker process; an exception would arrive as a traceback."""

    sentence: str


class BatchDataset(Dataset[Batch | Failure]):
    """A dataset of complete batches, indexed by lists of :class:`Draw`.

    Args:
        images: the set.
        transform: function from an image to a tensor; it uses torch's random numbers.
        seed: seed of the transform and of replacements.
        replace: replace unreadable images, for training; otherwise the batch omits them.
    """

    def __init__(self, images: ImageSet, transform: Transform, seed: int, *, replace: bool) -> None:
        self.images, self.transform, self.seed, self.replace = images, transform, seed, replace

    def __getitem__(self, draws: Sequence[Draw]) -> Batch | Failure:
        bad: dict[int, BadImage] = {}
        try:
            loaded = [(draw.id, sample) for draw in draws if (sample := self._load(draw, bad)) is not None]
        except (DataError, ShardError) as error:
            return Failure(str(error))
        images = [image for _, (image, _) in loaded]
        return Batch(
            images=torch.stack(images) if images else self.transform(Image.new("RGB", (64, 64)))[None][:0],
            labels=torch.tensor([label for _, (_, label) in loaded], dtype=torch.int64),
            ids=torch.tensor([i for i, _ in loaded], dtype=torch.int64),
            bad=tuple(bad.values()),
        )

    def _load(self, draw: Draw, bad: dict[int, BadImage]) -> tuple[Tensor, int] | None:
        """Return the tensor and label of a sample or of its replacement."""
        for attempt in range(ATTEMPTS + 1):
            i = draw.id if attempt == 0 else self._substitute(draw, attempt)
            picture = self._picture(i, bad)
            if picture is not None:
                with torch_seeded("augmentation", self.seed, *draw):
                    return self.transform(picture), self.images.label(i)
            if not self.replace:
                return None
        raise DataError(
            f"{self.images.name(draw.id)} cannot be read, and neither can {ATTEMPTS} others that were tried "
            "instead: 'covpool check' lists the unreadable images"
        )

    def _picture(self, i: int, bad: dict[int, BadImage]) -> Image.Image | None:
        if i in bad:
            return None
        try:
            return decode(self.images.read(i))
        except BadImageError as error:
            bad[i] = BadImage(self.images.name(i), error.reason, str(error))
        except OSError as error:
            bad[i] = BadImage(self.images.name(i), "unreadable", error.strerror or str(error))
        return None

    def _substitute(self, draw: Draw, attempt: int) -> int:
        """Return another sample, chosen by the seed; the first attempts stay in the same group."""
        among = self.images.near(draw.id) if attempt <= ATTEMPTS // 2 else range(len(self.images))
        return among[number("replacement", self.seed, draw.epoch, draw.id, attempt) % len(among)]


def outlive_signals() -> Callable[[int], None]:
    """Return a ``worker_init_fn`` that makes workers ignore Ctrl-C and the first SIGTERM.

    A signal reaches all processes of a group, and a worker that dies would end the main process in the middle
    of a step. A worker exits with the main process, or at the second SIGTERM, with which torch ends stuck
    workers.
    """
    return partial(_outlive, _is_leaving())


@cache
def _is_leaving() -> Any:
    """Return a flag in shared memory that is set when the main process exits.

    Python ends its workers with one SIGTERM and then waits for them without limit, so the flag is set before.
    It is not created on import, because it takes a page of shared memory.
    """
    flag = RawValue("b", 0)
    atexit.register(setattr, flag, "value", 1)
    return flag


def _outlive(is_leaving: Any, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _report
    answers = iter((False, True))

    def handle(number: int, frame: FrameType | None) -> None:
        if is_leaving.value or next(answers, True):
            os._exit(0)

    signal.signal(signal.SIGTERM, handle)


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback as Python does, except if the main process left during a transfer."""
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)


T = TypeVar("T")
StartMethod = Literal["fork", "spawn", "forkserver"]


class TrainingLoader:
    """Load the training batches of one process.

    An unreadable image is replaced by another one, which depends only on the seed, the epoch and the sample.
    ``Batch.bad`` lists the unreadable images.

    Args:
        images: the set.
        order: order of the samples, in global batches.
        transform: from an image to a tensor, see :func:`covpool.data.transforms.training_transform`.
        seed: seed of the transform's random numbers.
        rank: rank of this process.
        world_size: number of processes that share a global batch.
        workers: number of processes that load images; 0 loads them in this process.
        start_method: start method of the workers (default: Python's).

    Example:
        With ``cursor`` the number of global batches so far, training resumes exactly::

            while cursor < epochs * loader.batches:
                for batch in loader.from_cursor(cursor):
                    ...
                    cursor += 1
    """

    def __init__(
        self,
        images: ImageSet,
        order: Order,
        transform: Transform,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        start_method: StartMethod | None = None,
    ) -> None:
        if order.batch_size < world_size:
            raise UsageError(
                f"batch_size must be at least {world_size}, the number of processes; got {order.batch_size}"
            )
        self.batches = order.batches(0)
        self._steps = _Steps(order, rank, world_size)
        dataset = BatchDataset(images, transform, seed, replace=True)
        self._loader = _make(dataset, self._steps, workers, start_method)

    def from_cursor(self, cursor: int) -> Iterator[Batch]:
        """Yield the batches from a cursor to the end of its epoch. Run one such loop at a time.

        Args:
            cursor: number of earlier global batches, counted over all epochs.
        """
        if cursor < 0:
            raise UsageError(f"cursor must be at least 0; got {cursor}")
        return self._rest(*divmod(cursor, self.batches))

    def _rest(self, epoch: int, start: int) -> Iterator[Batch]:
        self._steps.epoch, self._steps.start = epoch, start
        yield from _checked(self._loader)


class EvaluationLoader:
    """Load every image once, over all processes.

    Unreadable images are omitted from their batch and listed in ``Batch.bad``.

    Args:
        images: the set.
        transform: from an image to a tensor, see :func:`covpool.data.transforms.evaluation_transform`.
        batch_size: batch size per process.
        rank: rank of this process.
        world_size: number of processes. Their numbers of batches may differ by one.
        workers: as for :class:`TrainingLoader`.
        start_method: as for :class:`TrainingLoader`.
    """

    def __init__(
        self,
        images: ImageSet,
        transform: Transform,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        start_method: StartMethod | None = None,
    ) -> None:
        steps = _Steps(EvaluationOrder(len(images), batch_size, world_size), rank, world_size)
        self._loader = _make(BatchDataset(images, transform, 0, replace=False), steps, workers, start_method)

    def __iter__(self) -> Iterator[Batch]:
        return _checked(self._loader)


class _Steps(Sampler[list[Draw]]):
    """The draws of this process in each step of an epoch; iterated in the main process."""

    def __init__(self, order: Order, rank: int, world_size: int) -> None:
        self.order, self.rank, self.world_size = order, rank, world_size
        self.epoch, self.start = 0, 0

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch = self.epoch
        for step in range(self.start, self.order.batches(epoch)):
            draws = self._draws(epoch, step)
            if draws:
                yield draws

    def _draws(self, epoch: int, step: int) -> list[Draw]:
        ids = self.order.batch(epoch, step)
        if not self.order.repeats:
            return [Draw(epoch, i) for i in self.order.share(ids, self.rank, self.world_size).tolist()]
        # A repeated sample should be augmented differently, so its position in the epoch is part of the seed.
        indices = self.order.share(np.arange(len(ids)), self.rank, self.world_size)
        first = step * self.order.batch_size
        return [Draw(epoch, int(ids[place]), first + place) for place in indices.tolist()]


def _make(
    dataset: BatchDataset, steps: _Steps, workers: int, start_method: StartMethod | None
) -> DataLoader[Batch | Failure]:
    return DataLoader(
        dataset,
        batch_size=None,  # the dataset returns complete batches
        sampler=steps,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pins_memory(),
        persistent_workers=workers > 0,
        multiprocessing_context=start_method if workers > 0 else None,
        generator=torch.Generator(),  # without one, it would use the caller's
        worker_init_fn=outlive_signals() if workers else None,
    )


def _as_it_is(batch: T) -> T:
    return batch


def _checked(loader: DataLoader[Batch | Failure]) -> Iterator[Batch]:
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(WORKER_DIED) from error
        if isinstance(batch, Failure):
            raise DataError(batch.sentence)
        yield batch
