"""Result files: one format, one folder, and one way to resume.

A result is the file ``results/RELEASE/NAME--MACHINE--DEVICE.json``. It holds its origin: commit, versions,
machine, seed and arguments. A command that takes long writes the file after each part. Rerun the command to
resume: it keeps the parts in the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from covpool.errors import UsageError
from covpool.provenance import Results, check_schema, machine_name, new_results, release
from covpool.storage.files import replace_file

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
# The entries of every record.
ORIGIN = (
    "experiment",
    "schema_version",
    "date",
    "seed",
    "source",
    "versions",
    "machine",
    "device",
    "arguments",
)
# The entries that must be equal to resume a measurement of time.
SAME = ("seed", "source", "versions", "machine", "device")
SCHEMAS = Path(__file__).parent / "schemas"


def new_record(
    name: str,
    packages: Sequence[str],
    arguments: dict[str, Any] | None = None,
    *,
    device: str = "cpu",
    seed: int | None = None,
) -> Results:
    """Return a record with its origin and no results.

    Args:
        name: name of the experiment.
        packages: packages that the results depend on: of covpool, or of lab, as ``lab/bench``.
        arguments: settings of this run.
        device: kind of device, such as ``cpu``.
        seed: random seed; ``None`` if nothing is random or each part has its own.
    """
    places = [f"../../{package}" if package.startswith("lab/") else package for package in packages]
    return {"experiment": name, **new_results(places, arguments or {}, device, seed)}


def record_file(record: Results, out: str | Path = RESULTS) -> Path:
    """Return the file of a record: in a folder per release, named by experiment, machine and device."""
    name = f"{record['experiment']}--{machine_name(record['machine'])}--{record['device']}.json"
    return Path(out) / release(str(record["versions"]["covpool"])) / name


def shown_file(folder: Path, name: str) -> Path | None:
    """Return the file of an experiment that a page shows: the first by name, ``None`` if there is none."""
    return min(folder.glob(f"{name}--*.json"), default=None)


def resumable_file(record: Results) -> Path:
    """Return the file of accuracies to resume: that of an earlier run on any machine, or a new one."""
    return shown_file(RESULTS / release(), record["experiment"]) or record_file(record)


def committed_file(name: str) -> Path:
    """Return the file of an experiment that the pages show."""
    file = shown_file(RESULTS / release(), name)
    if file is None:
        raise UsageError(f"there are no results of {name} in {RESULTS / release()}")
    return file


def resumed(record: Results, file: Path, *, same: Collection[str] = (), again: bool = False) -> Results:
    """Return a record with the parts that its file already holds.

    Accuracies do not depend on machine and commit, so their records are resumed everywhere. Times do: their
    records name the entries that must be equal.

    Args:
        record: record of this run.
        file: its file, which may not exist.
        same: entries, and arguments, that must be equal in the file.
        again: ignore the file.

    Raises:
        UsageError: if an entry differs.
    """
    if again or not file.exists():
        return record
    held = read_record(file)
    before, now = ({**each["arguments"], **each} for each in (held, record)) if same else ({}, {})
    changed = [name for name in same if before[name] != now[name]]
    if changed:
        raise UsageError(
            f"cannot resume {file}: {', '.join(changed)} changed since; pass --again to start again"
        )
    return {**record, **{name: part for name, part in held.items() if name not in ORIGIN}}


def read_record(file: str | Path, name: str | None = None) -> Results:
    """Read a record, and check it against the schema of its experiment, if there is one.

    Raises:
        UsageError: if it is not a record of the experiment ``name``.
    """
    record: Results = json.loads(Path(file).read_text(encoding="utf-8"))
    if name is not None and (recorded := record.get("experiment")) != name:
        raise UsageError(f"{file} has the results of {recorded}, not of {name}")
    _check(record)
    return record


def write_record(file: Path, record: Results, page: str | None = None) -> None:
    """Check a record, and replace its file in one step; a page becomes the ``.md`` file next to it."""
    _check(record)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    if page is not None:
        replace_file(file.with_suffix(".md"), f"{page}\n".encode())


def with_block(text: str, name: str, block: str) -> str:
    """Return a Markdown page with a new block between ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Raises:
        UsageError: if the page has no such lines.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in text or end not in text:
        raise UsageError(f"the page has no lines {begin} and {end} to write between")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end, 1)[1]}"


def _check(record: Results) -> None:
    # The reproductions of the paper's tables and figures share a schema.
    for name in (record.get("experiment"), "reproduction" if "timed_at" in record else None):
        if name is not None and (SCHEMAS / f"{name}.json").exists():
            check_schema(record, "lab", name)
