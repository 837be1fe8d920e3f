"""Compute predictions or embeddings of any number of images into a folder of Parquet or CSV files."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from covpool.data.image_set import ImageSet
from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing
from covpool.errors import OtherJobError, UsageError
from covpool.inference import CSV_IMAGES, Embed, Files, Format, Predict, Running
from covpool.inference.place import MANIFEST, OutputManifest, Place, open_place, table_part
from covpool.inference.tasks import Columns, Task, is_unreachable, read_column, read_rows, write_table
from covpool.inference.work import (
    Decoder,
    Predictor,
    Progress,
    Unit,
    Work,
    divide,
    image_id,
    run_local,
)
from covpool.models.bundle import pinned, read_card
from covpool.models.card import Card, bundle_digest
from covpool.storage.address import Address
from covpool.storage.files import json_bytes
from covpool.storage.folders import check_outside
from covpool.storage.manifest import Part
from covpool.storage.remote import Requests, limited
from covpool.terminal import counted, duration, printable

LOGGER = logging.getLogger("covpool")


@dataclass(frozen=True)
class TableWriter:
    """Write the rows of a unit into a separate file, or some of them into the file that is there."""

    place: Place
    format: Format

    def file(self, unit: Unit) -> str:
        """Return the name of the file of a unit."""
        return f"{unit.name}.{self.format}"

    def __call__(self, unit: Unit, parts: Sequence[Columns]) -> dict[str, Part]:
        """Write all rows of a unit at once, and return the entry of the file."""
        file = self.file(unit)
        old = self.place.read(file) if unit.only else None
        indices = [number - unit.start for number in unit.only]
        data, unreachable = write_table(parts, self.format, old, indices)
        self.place.write(file, data)
        return {file: table_part(data, unreachable)}


JOB = "_job.json"
# The largest numbers of images whose predictions are also returned, and printed.
RETURNED, SHOWN = 1000, 20
FORMAT, VERSION = "covpool bulk", 1


def describe_job(card: Card, task: Task, files: Files, images: ImageSet, units: list[Unit]) -> dict[str, Any]:
    """Return everything that rows depend on. Batch sizes and devices change only the last bits of a value."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "task": type(task).__name__.lower(),
        "options": asdict(task),  # type: ignore[arg-type]  # tasks are dataclasses
        "files": asdict(files),
        "bundle": bundle_digest(card),
        "images": len(images),
        "units": len(units),
        "input": images.stamp(),
    }


def begin_or_continue(place: Place, job: Mapping[str, Any], out: str) -> dict[str, int]:
    """Describe the job in the folder, or check that it belongs to it; return its files with their sizes.

    A job without rows may still change, unless another process may have started it (no locks).

    Raises:
        ValueError: if the folder belongs to another job, or holds other files.
    """
    there = place.sizes()
    names = there.keys() - {MANIFEST}
    if JOB in names and (names != {JOB} or not place.has_locks):
        _check_same(_read(place, out), json.loads(json.dumps(job)), out)
    elif names - {JOB}:
        raise UsageError(
            f"{out} holds other files, such as {min(names)!r}: use a new or empty folder as --out"
        )
    else:
        if names:
            _read(place, out)  # raises if the file is not of covpool
        place.write(JOB, json_bytes(job))
    return there


def _read(place: Place, out: str) -> Any:
    try:
        job = json.loads(place.read(JOB))
    except (ValueError, RecursionError):
        job = None
    if not isinstance(job, dict) or job.get("format") != FORMAT:
        raise UsageError(f"{out} has a {JOB} that covpool did not write: give another folder by --out")
    return job


def _with_format(files: Files, task: Task, images: int, place: Place) -> Files:
    """Replace the format auto: by that of the rows in the folder, or by the number of images."""
    if files.format != "auto":
        return files
    endings = {name.rpartition(".")[2] for name in place.sizes()}
    if not endings & {"csv", "parquet"}:
        endings = {"csv" if isinstance(task, Predict) and images <= CSV_IMAGES else "parquet"}
    return replace(files, format="parquet" if "parquet" in endings else "csv")


def _check_same(earlier: Mapping[str, Any], now: Mapping[str, Any], out: str) -> None:
    before, after = _flat(earlier), _flat(now)
    different = [name for name in after if name != "data" and before.get(name) != after[name]]
    if different:
        changes = ", ".join(_change(name, before.get(name), after[name]) for name in different)
        raise OtherJobError(
            f"{out} holds rows of another job ({changes}): use the same settings to resume it, or give "
            "another folder by --out"
        )


def _flat(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in job if not isinstance(job[name], dict)} | {
        name: value for part in job.values() if isinstance(part, dict) for name, value in part.items()
    }


def _change(name: str, before: object, now: object) -> str:
    hashes = {"bundle": "another bundle", "input": "images of other names, sizes or dates"}
    return hashes.get(name) or f"{name} was {before}, is {now}"


@dataclass(frozen=True)
class Done:
    """The result of :func:`infer`.

    Attributes:
        out: the output folder, with one row (predictions or an embedding) for each image.
        images: the number of images in the input.
        files: the number of files with rows.
        new_images: images whose rows this call wrote.
        new_files: files that this call wrote.
        bad_images: new images whose rows have an error.
        seconds: the time it took.
        rows: the predictions of up to 1,000 images; ``None`` for more, whose rows are only in the files.
        unreachable: the number of rows, in all files, whose URL gave no answer.
        error: if no image can be used, the reason of the first; else empty.
    """

    out: str
    images: int
    files: int
    new_images: int
    new_files: int
    bad_images: int
    seconds: float
    rows: list[dict[str, Any]] | None = None
    unreachable: int = 0
    error: str = ""


def infer(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    task: Task,
    files: Files | None = None,
    running: Running | None = None,
    progress: Progress = lambda done, total: None,
    requests: Requests | None = None,
) -> Done:
    """Compute rows for every image, into a folder of Parquet or CSV files.

    Call it again after an interruption to resume: each file is complete or absent. An output file that
    someone changed is computed again. An unreadable image, or a URL that gives no answer, becomes a row with
    an error.

    Args:
        bundle: the folder of a model, or its address on the Hub.
        data: an image, or a folder, list, Parquet or tar files of images; a path or a URL. See
            :func:`covpool.data.sources.open_unlabeled`.
        out: a folder or a remote URL; new, empty, or of this same job.
        task: a ``Predict`` or an ``Embed`` of :mod:`covpool.inference`.
        files: how rows are divided into files.
        running: how it is run.
        progress: called with the number of images done and the total.
        requests: limits of requests for remote images; ``timeout`` also limits the decoding of an image.

    Raises:
        ValueError: for example if ``out`` has the rows of another job.
    """
    read_card(bundle)  # raises before the images are listed
    _check_outside(out, data)
    requests = requests or Requests()
    with limited(requests):
        images = open_unlabeled(data)
    return infer_set(
        bundle, images, out, task, files, running, progress, name=str(data), timeout=requests.timeout
    )


def infer_set(
    bundle: str | Path,
    images: ImageSet,
    out: str | Path,
    task: Task,
    files: Files | None = None,
    running: Running | None = None,
    progress: Progress = lambda done, total: None,
    *,
    name: str,
    timeout: float = Requests.timeout,
) -> Done:
    """Compute rows for the images of a set, whose name is part of the job; see :func:`infer`."""
    files, running = files or Files(), running or Running()
    started = time.monotonic()
    card = read_card(bundle)
    units = divide(images, files.rows_per_file)
    place = open_place(out)
    files = _with_format(files, task, len(images), place)
    kind: Format = "csv" if files.format == "csv" else "parquet"
    writer, manifest = TableWriter(place, kind), OutputManifest(place)
    with place.held():
        job = describe_job(card, task, files, images, units) | {"data": name}
        there = begin_or_continue(writer.place, job, str(out))
        left = list(_left(images, units, writer, manifest, running, there))
        is_exact = not isinstance(task, Predict | Embed)
        decoder = Decoder(Preprocessing.of(card.preprocessing), is_exact, timeout)
        pad_to = running.batch_size if is_exact or running.compile else 0
        predictor = partial(
            Predictor, pinned(bundle), task, running.device, card.sha256, pad_to, running.compile
        )
        try:
            work = Work(images, left, decoder, predictor, writer, manifest.add)
            bad = _engine(running)(work, running, progress) if left else 0
        except BaseException:
            with contextlib.suppress(OSError, ValueError):  # of a full disk, as the first error
                manifest.save()
            raise
        manifest.save()
    rows = None
    if isinstance(task, Predict) and len(images) <= RETURNED:
        rows = [row for unit in units for row in read_rows(place.read(writer.file(unit)), kind)]
    error = ""
    if len(images) in (1, bad) or (rows and all(row["error"] for row in rows)):
        first = read_column(place.read(writer.file(units[0])), kind, "error")[0]
        error = _none_is_good(name, images, first) if first else ""
    return Done(
        out=str(out),
        images=len(images),
        files=len(units),
        new_images=sum(map(len, left)),
        new_files=len(left),
        bad_images=bad,
        seconds=time.monotonic() - started,
        rows=rows,
        unreachable=sum(part.facts["unreachable"] for part in manifest.parts.values()),
        error=error,
    )


def _none_is_good(name: str, images: ImageSet, error: str) -> str:
    """Return a sentence on images of which none can be used."""
    first = image_id(images, 0)
    if len(images) > 1:
        return f"none of the {len(images):,} images of {name} can be used; the first, {first}: {error}"
    return f"{name if name.endswith(first) else f'{first} of {name}'} cannot be used: {error}"


def _left(
    images: ImageSet,
    units: Sequence[Unit],
    writer: TableWriter,
    manifest: OutputManifest,
    running: Running,
    there: dict[str, int],
) -> Iterator[Unit]:
    """Yield the units without a valid file; with ``retry`` also the rows whose URL gave no answer."""
    manifest.read(there)
    for unit in units:
        file = writer.file(unit)
        if file not in there:
            yield unit
            continue
        if file in manifest.parts:
            is_valid = manifest.is_valid(file, there[file], running.verify)
        else:  # of a process that was killed; only its ids can be checked
            is_valid = not running.verify and _adopt(images, unit, writer, manifest)
        if not is_valid:
            LOGGER.warning("%s was truncated or changed since it was written: computing it again", file)
            yield unit
        elif running.retry and manifest.parts[file].facts["unreachable"]:
            errors = read_column(writer.place.read(file), writer.format, "error")
            only = (unit.start + k for k, error in enumerate(errors) if is_unreachable(error or ""))
            yield replace(unit, only=tuple(only))


def _adopt(images: ImageSet, unit: Unit, writer: TableWriter, manifest: OutputManifest) -> bool:
    """Return whether a file has the rows of its unit, and add it to the manifest if it does."""
    file = writer.file(unit)
    data = writer.place.read(file)
    try:
        ids, errors = (read_column(data, writer.format, name) for name in ("id", "error"))
    except UsageError:
        return False
    if ids != [image_id(images, i) for i in unit.numbers]:
        return False
    manifest.add({file: table_part(data, sum(is_unreachable(error or "") for error in errors))})
    return True


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
        from covpool.inference.ray_engine import run_ray  # here: Ray is optional
    except ModuleNotFoundError as error:
        raise UsageError(f"--engine ray needs {error.name}: pip install 'covpool[scale]'") from error
    return run_ray


def report_text(done: Done) -> str:
    """Return the classes of a few images, a line on the rows, and one on new images that are unreadable."""
    rows = done.rows if done.rows and done.images <= SHOWN else []
    return "\n".join([*map(_answer, rows), _rows_text(done)])


def _answer(row: Mapping[str, Any]) -> str:
    """Return a line such as ``bird.jpg: Song Sparrow 93.1 %, Vesper Sparrow 4.2 %``."""
    if row["error"]:
        return f"{printable(row['id'])}: {printable(row['error'])}"
    ranks = range(1, sum(name.startswith("label") for name in row) + 1)
    classes = (f"{row[f'label{k}']} {row[f'score{k}']:.1%}" for k in ranks)
    return printable(f"{row['id']}: {', '.join(classes)}")


def _rows_text(done: Done) -> str:
    files = counted(done.files, "file")
    there = f"{done.out}: {counted(done.images, 'row')} in {files}"
    if not done.new_files:
        again = f", {done.unreachable:,} of them could not be opened (--retry)" if done.unreachable else ""
        return f"{there}, all of them there already{again}"
    rate = done.new_images / max(done.seconds, 1e-9)
    speed = "" if rate < 1 else f" ({rate:,.0f} images per second)"
    new = "" if done.new_images == done.images else f", {done.new_images:,} rows of them new"
    lines = [f"{there}{new}, in {duration(done.seconds)}{speed}"]
    if done.bad_images:
        lines.append(f"unreadable images: {done.bad_images:,} of the new ones; see the column error")
    if done.unreachable:
        lines.append(
            f"files and URLs that could not be opened: {done.unreachable:,}; see the column error, and use "
            "--retry to try them again"
        )
    return "\n".join(lines)
