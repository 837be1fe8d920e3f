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
from covpool.errors import BadImageError, DataError, ShardError, UsageError

Transform = Callable[[Image.Image], Tensor]

# Others that are tried in place of a bad image, the first half of them near it.
ATTEMPTS = 16


class BadImage(NamedTuple):
    """An image that could not be used.

    Attributes:
        name: of the image.
        reason: in a word or two; see :class:`covpool.data.decode.BadImageError`.
        sentence: what exactly.
    """

    name: str
    reason: str
    sentence: str


class Batch(NamedTuple):
    """What a loader yields.

    Attributes:
        images: ``(B, 3, height, width)``.
        labels: ``(B,)``.
        ids: ``(B,)``, the samples that the order asked for. Where one was bad, image and label are another's.
        bad: the images that could not be used.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    bad: Sequence[BadImage]


class Draw(NamedTuple):
    """A sample to load, and what its random numbers depend on.

    Attributes:
        epoch: in which it comes.
        id: the sample.
        occurrence: tells apart the times that a sample comes in one epoch.
    """

    epoch: int
    id: int
    occurrence: int = 0


class Failure(NamedTuple):
    """A :class:`DataError` on its way from a worker process, which would wrap an exception in a traceback."""

    sentence: str


class BatchDataset(Dataset[Batch | Failure]):
    """Makes whole batches: an index is the list of the draws in it.

    Args:
        images: the set.
        transform: from a picture to a tensor; its random numbers are torch's.
        seed: of its random numbers and of replacements.
        replace: put another image in the place of a bad one, in training; otherwise the batch lacks it.
    """

    def __init__(self, images: ImageSet, transform: Transform, seed: int, *, replace: bool) -> None:
        self.images, self.transform, self.seed, self.replace = images, transform, seed, replace

    def __getitem__(self, draws: Sequence[Draw]) -> Batch | Failure:
        bad: dict[int, BadImage] = {}
        try:
            loaded = [(draw.id, found) for draw in draws if (found := self._load(draw, bad)) is not None]
        except (DataError, ShardError) as error:
            return Failure(str(error))
        images = [image for _, (image, _) in loaded]
        return Batch(
            images=torch.stack(images) if images else self._no_images(),
            labels=torch.tensor([label for _, (_, label) in loaded], dtype=torch.int64),
            ids=torch.tensor([i for i, _ in loaded], dtype=torch.int64),
            bad=tuple(bad.values()),
        )

    def _load(self, draw: Draw, bad: dict[int, BadImage]) -> tuple[Tensor, int] | None:
        """The tensor and label of a sample, or of the one in its place."""
        for attempt in range(ATTEMPTS + 1):
            i = draw.id if attempt == 0 else self._substitute(draw, attempt)
            picture = self._picture(i, bad)
            if picture is not None:
                with torch_seeded("augmentation", self.seed, *draw):
                    return self.transform(picture), self.images.label(i)
            if not self.replace:
                return None
        raise DataError(
            f"{self.images.name(draw.id)} cannot be used, nor can any of {ATTEMPTS} others drawn in its "
            "place: 'covpool check' lists what is wrong with which images"
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

    def _no_images(self) -> Tensor:
        """None at all, of the shape that images have."""
        return self.transform(Image.new("RGB", (64, 64)))[None][:0]


def outlive_signals() -> Callable[[int], None]:
    """For ``worker_init_fn``: lets the main process decide what a signal to all of them means, as Ctrl-C is.

    A worker that died of it would take the main process along, in the middle of a step. It goes when the
    main process goes, or when it is told twice, which is how torch ends workers that are stuck.
    """
    return partial(_outlive, _is_leaving())


@cache
def _is_leaving() -> Any:
    """Whether the main process is at its end; workers see it too.

    It is set before Python ends its workers, which it does with one SIGTERM, and then waits for them as long
    as it takes. Not made on import: it takes a page of shared memory.
    """
    flag = RawValue("b", 0)
    atexit.register(setattr, flag, "value", 1)
    return flag


def _outlive(is_leaving: Any, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _report
    told = iter((False, True))

    def handle(number: int, frame: FrameType | None) -> None:
        if is_leaving.value or next(told, True):
            os._exit(0)

    signal.signal(signal.SIGTERM, handle)


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As Python does, but not that the main process was interrupted while a tensor was handed over."""
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)


T = TypeVar("T")
StartMethod = Literal["fork", "spawn", "forkserver"]


class TrainingLoader:
    """The batches of one process in training.

    Where an image cannot be used, another takes its place, chosen by the seed, the epoch and the sample
    alone; the batch tells.

    Args:
        images: the set.
        order: of its samples, in global batches.
        transform: from a picture to a tensor, as :func:`covpool.data.transforms.training_transform`.
        seed: of the transform's random numbers.
        rank: of this process.
        world_size: the number of processes that divide a global batch.
        workers: processes that load images; 0 to load them in this one.
        start_method: of the workers; Python's default if not given.

    Example:
        With ``cursor`` the number of global batches so far, training goes on as if it had not stopped::

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
                f"batch_size must be at least {world_size}, the processes; got {order.batch_size}"
            )
        self.batches = order.batches(0)
        self._steps = _Steps(order, rank, world_size)
        dataset = BatchDataset(images, transform, seed, replace=True)
        self._loader = _make(dataset, self._steps, workers, start_method)

    def from_cursor(self, cursor: int) -> Iterator[Batch]:
        """The batches from a cursor to the end of its epoch; one such loop at a time.

        Args:
            cursor: the number of global batches before, counted over all epochs.
        """
        if cursor < 0:
            raise UsageError(f"cursor must be at least 0; got {cursor}")
        return self._rest(*divmod(cursor, self.batches))

    def _rest(self, epoch: int, start: int) -> Iterator[Batch]:
        self._steps.epoch, self._steps.start = epoch, start
        yield from _checked(self._loader)


class EvaluationLoader:
    """Every image once, over all processes; one that cannot be used is left out of its batch, which tells.

    Args:
        images: the set.
        transform: from a picture to a tensor, as :func:`covpool.data.transforms.evaluation_transform`.
        batch_size: of each process.
        rank: of this process.
        world_size: the number of processes. Their numbers of batches may differ by one.
        workers: as for training.
        start_method: as for training.
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
    """What this process draws in each step of an epoch; it is asked in the main process."""

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
        # A sample that comes again should not look the same again, so its place in the epoch counts too.
        places = self.order.share(np.arange(len(ids)), self.rank, self.world_size)
        first = step * self.order.batch_size
        return [Draw(epoch, int(ids[place]), first + place) for place in places.tolist()]


def _make(
    dataset: BatchDataset, steps: _Steps, workers: int, start_method: StartMethod | None
) -> DataLoader[Batch | Failure]:
    return DataLoader(
        dataset,
        batch_size=None,  # the dataset makes whole batches
        sampler=steps,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        multiprocessing_context=start_method if workers > 0 else None,
        generator=torch.Generator(),  # or it would draw a number from the caller's
        worker_init_fn=outlive_signals() if workers else None,
    )


def _as_it_is(batch: T) -> T:
    return batch


def _checked(loader: DataLoader[Batch | Failure]) -> Iterator[Batch]:
    for batch in loader:
        if isinstance(batch, Failure):
            raise DataError(batch.sentence)
        yield batch
