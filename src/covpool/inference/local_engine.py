"""Run bulk inference on this machine: workers decode, this process computes, a thread writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from covpool.data.batch import Failure
from covpool.data.image_set import ImageSet
from covpool.data.loader import outlive_signals
from covpool.errors import DataError, ShardError
from covpool.inference.options import Running
from covpool.inference.tasks import Columns
from covpool.inference.work import Batch, Decoder, Progress, Unit, Work, bad_rows


class Piece(NamedTuple):
    """A mini-batch to be made."""

    unit: Unit
    numbers: range


class Decoded(NamedTuple):
    """A mini-batch that was made, or why there will be no more."""

    piece: Piece
    batch: Batch | Failure


def run_local(work: Work, running: Running, progress: Progress) -> int:
    """Do it, and return how many of the images were bad.

    Raises:
        DataError: where the input cannot be read any more.
        OSError: where the rows cannot be written.
    """
    predictor = work.make_predictor()
    total, done, bad = sum(map(len, work.units)), 0, 0
    unfinished: dict[str, list[Columns]] = {}
    with ThreadPoolExecutor(1) as thread:
        writing: Future[None] | None = None
        for (unit, numbers), batch in _batches(work, running):
            if isinstance(batch, Failure):
                raise DataError(batch.sentence)
            rows = predictor(batch)
            unfinished.setdefault(unit.name, []).append(rows)
            done, bad = done + len(numbers), bad + bad_rows(rows)
            if numbers.stop == unit.stop:
                if writing is not None:
                    writing.result()  # one at a time: rows that wait take memory
                writing = thread.submit(work.writer, unit, unfinished.pop(unit.name))
            progress(done, total)
        if writing is not None:
            writing.result()
    return bad


def _batches(work: Work, running: Running) -> Iterator[Decoded]:
    loader = DataLoader(
        _Batches(work.images, work.decoder),
        batch_size=None,
        sampler=_Pieces(work.units, running),
        num_workers=running.workers,
        collate_fn=_as_it_is,
        worker_init_fn=outlive_signals() if running.workers else None,
    )
    return (decoded for decoded in loader if decoded is not None)


class _Batches(Dataset[Decoded | None]):
    """Makes mini-batches, in a worker."""

    def __init__(self, images: ImageSet, decoder: Decoder) -> None:
        self.images, self.decoder = images, decoder

    def __getitem__(self, piece: Piece | None) -> Decoded | None:
        if piece is None:
            return None
        try:
            return Decoded(piece, self.decoder.batch(self.images, piece.numbers))
        except ShardError as error:  # raised here, it would arrive with a traceback around it
            return Decoded(piece, Failure(str(error)))


class _Pieces:
    """The mini-batches of as many units at a time as there are workers, in turn.

    Workers are asked in turn too, so each gets all of a unit. Where units run out, ``None`` keeps the turns.
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


def _as_it_is(batch: Any) -> Any:
    return batch
