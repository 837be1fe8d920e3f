"""A whole job: from a bundle and images to a folder of rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from covpool.data.inside import check_outside
from covpool.data.transforms import Preprocessing
from covpool.evaluate.bulk.decode import Decoder
from covpool.evaluate.bulk.inputs import open_input
from covpool.evaluate.bulk.inputs.address import Address
from covpool.evaluate.bulk.job import Files, begin_or_continue, describe_job
from covpool.evaluate.bulk.local_engine import run_local
from covpool.evaluate.bulk.place import open_place
from covpool.evaluate.bulk.predictor import Predictor
from covpool.evaluate.bulk.tasks import Task
from covpool.evaluate.bulk.units import divide
from covpool.evaluate.bulk.work import Progress, Running, Work, Writer
from covpool.models.bundles import read_card


@dataclass(frozen=True)
class Done:
    """What a call did.

    Attributes:
        out: where the rows are.
        images: in the input.
        files: of rows, all of them there.
        new_images: whose rows this call wrote.
        new_files: that this call wrote.
        bad_images: of the new ones, whose rows have an error.
        seconds: that it took.
    """

    out: str
    images: int
    files: int
    new_images: int
    new_files: int
    bad_images: int
    seconds: float


def infer(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    task: Task,
    files: Files | None = None,
    running: Running | None = None,
    progress: Progress = lambda done, total: None,
) -> Done:
    """Compute something for every image, into a folder of Parquet or CSV files.

    If it is killed, the same call goes on where it was: files are whole or not there. A bad image becomes a
    row with an error.

    Args:
        bundle: the folder of a model.
        data: as for :func:`covpool.evaluate.bulk.inputs.kinds.open_input`.
        out: a folder, or an address of a store; new, empty, or of this same job.
        task: a :class:`~covpool.evaluate.bulk.tasks.Predict` or an
            :class:`~covpool.evaluate.bulk.tasks.Embed`.
        files: how rows are divided into files.
        running: how it is run.
        progress: is told how many images are done, and how many there are to do.

    Raises:
        ValueError: in a sentence, for example if ``out`` has the rows of another job.
    """
    files, running = files or Files(), running or Running()
    started = time.monotonic()
    card = read_card(bundle)
    _check_outside(out, data)
    images = open_input(data)
    units = divide(images, files.rows_per_file)
    writer = Writer(open_place(out), files.format)
    with writer.place.held():
        job = describe_job(card, task, files, images, units)
        there = begin_or_continue(writer.place, job, str(out))
        left = [unit for unit in units if writer.file(unit) not in there]
        decoder = Decoder(Preprocessing.of(card.preprocessing))
        predictor = partial(Predictor, Path(bundle).resolve(), task, running.device, card.sha256)
        bad = (
            _engine(running)(Work(images, left, decoder, predictor, writer), running, progress) if left else 0
        )
    return Done(
        out=str(out),
        images=len(images),
        files=len(units),
        new_images=sum(map(len, left)),
        new_files=len(left),
        bad_images=bad,
        seconds=time.monotonic() - started,
    )


def _check_outside(out: str | Path, data: str | Path) -> None:
    rows, images = Address.of(out), Address.of(data)
    if rows.is_local and images.is_local:
        check_outside(rows.path, images.path, "rows")
    elif rows.store == images.store and rows.path.startswith(f"{images.path.rstrip('/')}/"):
        raise ValueError(f"rows would go into the images themselves, as {out} is in {data}: give --out")


def _engine(running: Running) -> Callable[[Work, Running, Progress], int]:
    if running.engine == "local":
        return run_local
    try:
        from covpool.evaluate.bulk.ray_engine import run_ray  # here, because Ray is for clusters alone
    except ModuleNotFoundError as error:
        raise ValueError(f"--engine ray needs {error.name}: pip install 'covpool[scale]'") from error
    return run_ray
