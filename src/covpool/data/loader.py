"""Batches in the order of training, or of evaluation, made by worker processes.

What is in a batch, to the bit, does not depend on the number of workers nor on where the loader started, and
no random numbers of the caller are used up. Workers stay alive from epoch to epoch. Where they are forked
(Linux, by default) they share the set with the main process; where they are spawned each receives a pickled
copy, which for shards is a list of the shards, not of the samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from covpool.data.batch import Batch, BatchDataset, DataError, Draw, Failure, Transform
from covpool.data.image_set import ImageSet
from covpool.data.order import EvaluationOrder, Order
from covpool.data.workers import outlive_signals

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
            raise ValueError(
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
            raise ValueError(f"cursor must be at least 0; got {cursor}")
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
