"""Run bulk inference on a Ray cluster.

A row of the Ray dataset is a unit. Tasks decode its images, and actors with a network each write its file.
Both may run on any machine, so bundle, input and output must be paths or URLs that all machines share.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import numpy as np
import ray
import ray.data
from ray.exceptions import RayError, RayTaskError, UserCodeException

from covpool.data.image_set import ImageSet
from covpool.errors import DataError, LostProcessError, ShardError
from covpool.inference import Running
from covpool.inference.tasks import Columns
from covpool.inference.work import Batch, Decoder, Progress, Unit, Work, Writer, bad_rows
from covpool.storage.manifest import parts_from_json, parts_to_json

Row = dict[str, Any]
COLUMNS = ("id", "image", "error", "content")


def run_ray(work: Work, running: Running, progress: Progress) -> int:
    """Do the work, and return the number of bad images.

    Raises:
        DataError: if the whole input became unreadable, or the rows cannot be written.
    """
    total, done, bad = sum(map(len, work.units)), 0, 0
    with cluster(running.ray_address), _quiet():
        for row in _dataset(work, running).iter_rows():
            if row["failure"]:
                raise DataError(row["failure"])
            work.add(parts_from_json(json.loads(row["part"])))
            done, bad = done + int(row["images"]), bad + int(row["bad"])
            progress(done, total)
    return bad


def _dataset(work: Work, running: Running) -> ray.data.Dataset:
    images = ray.put(work.images)
    # As text, since Ray would make arrays of different lengths.
    units = [{"name": unit.name, "unit": json.dumps(asdict(unit))} for unit in work.units]
    cpus, gpus = _shares(running)
    return (
        ray.data.from_items(units, override_num_blocks=len(units))
        .map(partial(_decode, [images], work.decoder), num_cpus=1)
        .map_batches(
            _Actor,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=running.actors),
            fn_constructor_args=(work.make_predictor, work.writer, running.batch_size),
            num_cpus=cpus,
            num_gpus=gpus,
        )
    )


def _shares(running: Running) -> tuple[float, float]:
    """Return the cores and GPUs of an actor; at least half of the cores are left to decode."""
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = int(there.get("GPU", 0) > 0 if running.device == "auto" else running.device != "cpu")
    # Always below one: Ray fuses an actor that needs as much as a task with that task.
    return min(0.99, there.get("CPU", 1) / (2 * running.actors)), gpus


def _decode(images: list[Any], decoder: Decoder, unit: Row) -> Row:
    """Decode a unit into one row, which Ray cannot split."""
    failure = ""
    try:
        batch = decoder.batch(_received(images[0]), _unit(unit["unit"]).numbers)
    except ShardError as error:  # Ray would wrap it in pages of tracebacks
        batch, failure = decoder.batch(_received(images[0]), range(0)), str(error)
    return {**unit, **batch, "image": batch["image"].numpy(), "failure": failure}


def _unit(text: str) -> Unit:
    fields = json.loads(text)
    return Unit(**(fields | {"only": tuple(fields["only"])}))


@cache
def _received(images: Any) -> ImageSet:
    """Fetch the input once in each process."""
    received: ImageSet = ray.get(images)
    return received


class _Actor:
    """A process with a network, which writes the rows of a unit at a time."""

    def __init__(
        self, make_predictor: Callable[[], Callable[[Batch], Columns]], writer: Writer, batch_size: int
    ) -> None:
        self.predictor, self.writer, self.batch_size = make_predictor(), writer, batch_size

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Write the rows of a unit, in the batches of the local engine; return the counts as a row."""
        unit, part = _unit(str(rows["unit"][0])), None
        failure = str(rows["failure"][0])
        columns = {name: np.asarray(rows[name][0]) for name in COLUMNS if name in rows}
        parts = [] if failure else self._rows(unit, columns)
        try:
            if not failure:
                part = self.writer(unit, parts)
        except (OSError, ShardError) as error:
            failure = str(error)
        row = {
            "images": len(unit),
            "bad": sum(map(bad_rows, parts)),
            "failure": failure,
            "part": "" if part is None else json.dumps(parts_to_json(part)),
        }
        return {name: np.array([value]) for name, value in row.items()}

    def _rows(self, unit: Unit, columns: Batch) -> list[Columns]:
        parts = []
        for start in range(0, len(unit), self.batch_size):
            part = slice(start, start + self.batch_size)
            parts.append(self.predictor({name: values[part] for name, values in columns.items()}))
        return parts


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Use the cluster of the caller, or start one for the time of the job. All tasks are awaited inside.

    Raises:
        LostProcessError: if Ray lost a process or a machine of the cluster. Ray itself ends this process,
            with exit code 1, if the node that it is connected to dies.
    """
    with _lost(), _connected(address):
        yield


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except (RayTaskError, UserCodeException):  # an exception of a task, which is a bug
        raise
    except (RayError, ConnectionError) as error:
        (reason, *_) = str(error).strip().splitlines() or [""]
        raise LostProcessError(
            f"Ray stopped the job: {type(error).__name__}: {reason}. Rerun the command to resume"
        ) from error


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": address} if address else {"include_dashboard": False}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off Ray's progress bars and messages: the caller shows progress."""
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars, context.print_on_execution_start
    logger = logging.getLogger("ray.data")
    level = logger.level
    context.enable_progress_bars = context.print_on_execution_start = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = before
        logger.setLevel(level)
