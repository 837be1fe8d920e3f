"""What a protocol leaves: a folder with ``results.json``, which says what was tried on what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from covpool.data.image_set import ImageSet
from covpool.durable import LOCK, check_outside, replace_file, sync_folder
from covpool.errors import UsageError
from covpool.models.bundle import read_card
from covpool.models.card import plain_json, versions
from covpool.processes import Processes
from covpool.provenance import origin

Results = origin.Results
PACKAGE = "covpool.evaluate"
FILE = "results.json"
# What people call the results of a protocol, where that is not its name.
CALLED = {"accuracy": "evaluation", "retrieval": "search"}
# The code that a number depends on.
PACKAGES = ("functional", "nn", "models", "data", "inference", "train", "evaluate")


def new_results(protocol: str, arguments: dict[str, Any], processes: Processes, seed: int | None) -> Results:
    """What every file begins with. ``arguments`` are the caller's; its ``bundle`` is described here.

    Args:
        protocol: its name, which is also that of its schema.
        arguments: of the protocol's function.
        processes: that did the work.
        seed: of what came by chance; ``None`` where nothing did.
    """
    head = origin.new_results(PACKAGES, arguments, processes.device.type, seed)
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
    """Which images they are."""
    return {
        "split": split,
        "images": len(images),
        "classes": len(images.classes),
        "fingerprint": images.fingerprint(),
    }


def prepare_folder(folder: Path, protocol: str, data: str | None = None) -> None:
    """Make a folder for results, now, not after hours of work.

    Args:
        folder: need not be there yet.
        protocol: of the results.
        data: the images, where the results must not go.

    Raises:
        ValueError: in a sentence, if it is among the images, or holds something else, which would be mixed
            with them.
    """
    if data is not None:
        check_outside(folder, data, "results")
    if not folder.exists():
        folder.mkdir(parents=True)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file: give another --out")
    # A process that was killed may have left half a file under another name, or its lock alone.
    holds_something = any(
        not path.match(".*.covpool-saving") and path.name != LOCK for path in folder.iterdir()
    )
    is_known = _protocol_of(folder) == protocol or _unfinished(folder, protocol).exists()
    if holds_something and not is_known:
        called = CALLED.get(protocol, protocol)
        raise UsageError(f"{folder} holds other things: give a new --out, or that of an earlier {called}")


def begin_results(folder: Path, protocol: str) -> None:
    """Before the first file that goes with the results: earlier results are not of what is written now."""
    mark_folder(folder, protocol)
    (folder / FILE).unlink(missing_ok=True)


def mark_folder(folder: Path, protocol: str) -> None:
    """Until :func:`write_results`, so that :func:`prepare_folder` knows the folder after a stop."""
    _unfinished(folder, protocol).touch()
    sync_folder(folder)


def write_results(folder: Path, results: Results) -> None:
    """Check them against their schema, and write them in place of earlier ones."""
    plain = plain_json("results", results)
    origin.check_schema(plain, PACKAGE, plain["protocol"])
    replace_file(folder / FILE, (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode())
    _unfinished(folder, plain["protocol"]).unlink(missing_ok=True)


def closing_lines(folder: str, results: Results) -> str:
    """For a terminal: what was left out, and where everything is."""
    lines = [f"results: {Path(folder) / FILE}"]
    if bad := results["bad_images"]:
        listed = Path(folder) / "bad_images.csv"
        lines.insert(0, f"bad images: {bad:,}, left out; {listed} says why")
    return "\n".join(lines)


def _unfinished(folder: Path, protocol: str) -> Path:
    """The mark of a folder that is being written."""
    return folder / f".{protocol}.covpool-unfinished"


def _protocol_of(folder: Path) -> str | None:
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found.get("protocol") if isinstance(found, dict) else None
