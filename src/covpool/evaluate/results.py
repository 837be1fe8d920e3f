"""The results folder of a protocol, with ``results.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool import provenance
from covpool.data.image_set import ImageSet
from covpool.errors import UsageError
from covpool.models.bundle import read_card
from covpool.models.card import plain_json, versions
from covpool.processes import Processes
from covpool.storage.files import json_bytes, mark_file, read_json, replace_file, sync_folder
from covpool.storage.folders import LOCK, check_outside

Results = provenance.Results
PACKAGE = "covpool.evaluate"
FILE = "results.json"
# Names of protocols in messages, where they differ.
CALLED = {"accuracy": "evaluation", "retrieval": "search"}
# The packages that results depend on.
PACKAGES = ("functional", "nn", "models", "data", "inference", "training", "evaluate")


def new_results(protocol: str, arguments: dict[str, Any], processes: Processes, seed: int | None) -> Results:
    """Return the first fields of a result file, with a description of the bundle."""
    head = provenance.new_results(PACKAGES, arguments, processes.device.type, seed)
    head["versions"] |= versions()
    card = read_card(arguments["bundle"])
    bundle = {
        "sha256": card.sha256,
        "model": card.config.backbone,
        "pool": card.config.pool,
        "dim": card.config.dim,
        "image_size": card.preprocessing["input_size"][-1],
    }
    return {"protocol": protocol, **head, "processes": processes.world_size, "bundle": bundle}


def describe_images(images: ImageSet, split: str) -> dict[str, Any]:
    """Return the split, the size and the fingerprint of an image set."""
    return {
        "split": split,
        "images": len(images),
        "classes": len(images.classes),
        "fingerprint": images.fingerprint(),
    }


def prepare_folder(folder: Path, protocol: str, data: str | None = None) -> None:
    """Create the results folder before the work starts, so that problems show at once.

    Raises:
        ValueError: if the folder is inside the data set or holds other files.
    """
    if data is not None:
        check_outside(folder, data, "results")
    if not folder.exists():
        folder.mkdir(parents=True)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file: use another --out")
    # A killed process may leave a temporary file or its lock.
    holds_something = any(
        not path.match(".*.covpool-saving") and path.name != LOCK for path in folder.iterdir()
    )
    is_known = _protocol_of(folder) == protocol or _unfinished(folder, protocol).exists()
    if holds_something and not is_known:
        called = CALLED.get(protocol, protocol)
        raise UsageError(f"{folder} holds other files: use a new --out, or that of an earlier {called}")


def begin_results(folder: Path, protocol: str) -> None:
    """Mark the folder and remove the earlier results, which do not match the files written next."""
    mark_folder(folder, protocol)
    (folder / FILE).unlink(missing_ok=True)


def mark_folder(folder: Path, protocol: str) -> None:
    """Mark a folder until :func:`write_results`, so that :func:`prepare_folder` accepts it after a stop."""
    mark_file(_unfinished(folder, protocol))
    sync_folder(folder)


def write_results(folder: Path, results: Results) -> None:
    """Check results against their schema and replace the earlier file."""
    plain = plain_json("results", results)
    provenance.check_schema(plain, PACKAGE, plain["protocol"])
    replace_file(folder / FILE, json_bytes(plain))
    _unfinished(folder, plain["protocol"]).unlink(missing_ok=True)


def closing_lines(folder: str, results: Results) -> str:
    """Return the last lines for a terminal: unreadable images and the path of the results."""
    lines = [f"results: {Path(folder) / FILE}"]
    if bad := results["bad_images"]:
        listed = Path(folder) / "bad_images.csv"
        lines.insert(0, f"unreadable images: {bad:,}, left out; see {listed}")
    return "\n".join(lines)


def _unfinished(folder: Path, protocol: str) -> Path:
    """Return the file that marks an unfinished folder."""
    return folder / f".{protocol}.covpool-unfinished"


def _protocol_of(folder: Path) -> str | None:
    try:
        results = read_json(folder / FILE)
    except (OSError, ValueError):
        return None
    return results.get("protocol") if isinstance(results, dict) else None
