"""Compute predictions or embeddings of any number of images into a folder of Parquet or CSV files."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from covpool.data.image_set import ImageSet
from covpool.data.remote import Address
from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing
from covpool.durable import check_outside
from covpool.errors import UsageError
from covpool.inference.local_engine import run_local
from covpool.inference.options import Files, Running
from covpool.inference.output import Place, open_place
from covpool.inference.tasks import Task
from covpool.inference.work import Decoder, Predictor, Progress, Unit, Work, Writer, divide
from covpool.models.bundle import read_card
from covpool.models.card import Card
from covpool.wording import counted, duration

JOB = "job.json"
FORMAT, VERSION = "covpool bulk", 1


def describe_job(card: Card, task: Task, files: Files, images: ImageSet, units: list[Unit]) -> dict[str, Any]:
    """All that decides the rows. Batches, devices and engines do not, but for the last bits of a number."""
    bundle = [asdict(card.config), card.classes, card.preprocessing, card.sha256]
    return {
        "format": FORMAT,
        "version": VERSION,
        "task": type(task).__name__.lower(),
        "options": asdict(task),  # type: ignore[call-overload]  # tasks are dataclasses
        "files": asdict(files),
        "bundle": hashlib.sha256(json.dumps(bundle).encode()).hexdigest(),
        "images": len(images),
        "units": len(units),
        "input": images.stamp(),
    }


def begin_or_continue(place: Place, job: Mapping[str, Any], out: str) -> set[str]:
    """The names of the files that are done, once it is clear that they are of this job.

    Where there is no row yet, a job may still change; not where nothing keeps another from beginning it.

    Raises:
        ValueError: if the folder is another job's, or holds something else.
    """
    names = place.names()
    if JOB in names and (names != {JOB} or not place.has_locks):
        _check_same(_read(place, out), json.loads(json.dumps(job)), out)
    elif names - {JOB}:
        raise UsageError(
            f"{out} holds other things, such as {min(names)!r}: give a new or an empty folder by --out"
        )
    else:
        if names:
            _read(place, out)  # raises if it is none of ours
        place.write(JOB, (json.dumps(job, indent=2) + "\n").encode())
    return names


def _read(place: Place, out: str) -> Any:
    try:
        job = json.loads(place.read(JOB))
    except ValueError:
        job = None
    if not isinstance(job, dict) or job.get("format") != FORMAT:
        raise UsageError(f"{out} has a {JOB} that is none of covpool's: give another folder by --out")
    return job


def _check_same(earlier: Mapping[str, Any], now: Mapping[str, Any], out: str) -> None:
    before, after = _flat(earlier), _flat(now)
    different = [name for name in after if before.get(name) != after[name]]
    if different:
        told = ", ".join(_told(name, before.get(name), after[name]) for name in different)
        raise UsageError(
            f"{out} holds rows of another job ({told}): go on as it began, or give another folder by --out"
        )


def _flat(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in job if not isinstance(job[name], dict)} | {
        name: value for part in job.values() if isinstance(part, dict) for name, value in part.items()
    }


def _told(name: str, before: object, now: object) -> str:
    hashes = {"bundle": "another bundle", "input": "images of other names, sizes or dates"}
    return hashes.get(name) or f"{name} was {before}, is {now}"


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
        data: as for :func:`covpool.data.sources.open_unlabeled`.
        out: a folder, or an address of a store; new, empty, or of this same job.
        task: a :class:`~covpool.inference.tasks.Predict` or an
            :class:`~covpool.inference.tasks.Embed`.
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
    images = open_unlabeled(data)
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
        raise UsageError(f"rows would go into the images themselves, as {out} is in {data}: give --out")


def _engine(running: Running) -> Callable[[Work, Running, Progress], int]:
    if running.engine == "local":
        return run_local
    try:
        from covpool.inference.ray_engine import run_ray  # here, because Ray is for clusters alone
    except ModuleNotFoundError as error:
        raise UsageError(f"--engine ray needs {error.name}: pip install 'covpool[scale]'") from error
    return run_ray


def report_text(done: Done) -> str:
    """A line on what is there, and one on the bad images among what is new."""
    files = counted(done.files, "file")
    there = f"{done.out}: {counted(done.images, 'row')} in {files}"
    if not done.new_files:
        return f"{there}, all of them there already"
    rate = done.new_images / max(done.seconds, 1e-9)
    new = "" if done.new_images == done.images else f", {done.new_images:,} of them new"
    lines = [f"{there}{new}, in {duration(done.seconds)} ({rate:,.0f} images a second)"]
    if done.bad_images:
        lines.append(f"bad images: {done.bad_images:,} of the new ones; the column error says why")
    return "\n".join(lines)
