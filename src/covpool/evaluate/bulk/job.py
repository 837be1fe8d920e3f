"""What a folder of rows belongs to, so that a later call goes on with it or is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from covpool.evaluate.bulk.place import Place
from covpool.evaluate.bulk.tables import Format
from covpool.evaluate.bulk.tasks import Task
from covpool.evaluate.bulk.units import Unit, UnlabelledImages
from covpool.functional.arguments import check_choice, check_whole
from covpool.models.bundles import Card

JOB = "job.json"
FORMAT, VERSION = "covpool bulk", 1


@dataclass(frozen=True)
class Files:
    """How rows are divided into files.

    Attributes:
        format: ``"parquet"`` or ``"csv"``.
        rows_per_file: the most that a file has.
    """

    format: Format = "parquet"
    rows_per_file: int = 1024

    def __post_init__(self) -> None:
        check_choice("format", self.format, ("parquet", "csv"))
        check_whole("rows_per_file", self.rows_per_file, at_least=1)


def describe_job(
    card: Card, task: Task, files: Files, images: UnlabelledImages, units: list[Unit]
) -> dict[str, Any]:
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
        "input": images.fingerprint(),
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
        raise ValueError(
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
        raise ValueError(f"{out} has a {JOB} that is none of covpool's: give another folder by --out")
    return job


def _check_same(earlier: Mapping[str, Any], now: Mapping[str, Any], out: str) -> None:
    before, after = _flat(earlier), _flat(now)
    different = [name for name in after if before.get(name) != after[name]]
    if different:
        told = ", ".join(_told(name, before.get(name), after[name]) for name in different)
        raise ValueError(
            f"{out} holds rows of another job ({told}): go on as it began, or give another folder by --out"
        )


def _flat(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in job if not isinstance(job[name], dict)} | {
        name: value for part in job.values() if isinstance(part, dict) for name, value in part.items()
    }


def _told(name: str, before: object, now: object) -> str:
    hashes = {"bundle": "another bundle", "input": "images of other names, sizes or dates"}
    return hashes.get(name) or f"{name} was {before}, is {now}"
