"""Where a file of results is: ``<out>/<release>/<name>--<machine>--<device>.json``."""

from __future__ import annotations

from pathlib import Path

from covpool.provenance.machine import machine_name
from covpool.provenance.release import release
from covpool.provenance.results import Results


def results_path(out: str | Path, name: str, results: Results) -> Path:
    """Of results that begin as :func:`covpool.provenance.results.new_results` has it."""
    file = f"{name}--{machine_name(results['machine'])}--{results['device']}.json"
    return Path(out) / release(str(results["versions"]["covpool"])) / file


def results_file(folder: Path, name: str) -> Path | None:
    """What a page shows of a release: of several machines' files the first by name, ``None`` without any."""
    return min(folder.glob(f"{name}--*.json"), default=None)
