"""Results on disk: a JSON file for each suite, machine and device, checked against the suite's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from covpool.durable import replace_file
from covpool.errors import UsageError
from covpool.provenance import origin

Results = origin.Results
SUITES = ("isqrt_cov", "methods")


def check_device(device: str) -> None:
    """Raise if there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch sees no GPU here: pass cpu")


def new_results(
    suite: str, rooms: tuple[str, ...], arguments: dict[str, Any], device: str, seed: int
) -> Results:
    """What every file begins with: which code was measured how, on what; ``rooms`` are those that count."""
    return {"suite": suite, **origin.new_results(rooms, arguments, device, seed)}


def read_results(path: str | Path) -> Results:
    """Read and check a file of results."""
    results: Results = json.loads(Path(path).read_text(encoding="utf-8"))
    check_schema(results)
    return results


def write_results(path: Path, results: Results) -> None:
    """Check and write in one move: a reader, or a crash, never meets half a file."""
    check_schema(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(results, indent=2, ensure_ascii=False) + "\n").encode())


def schema(suite: str) -> dict[str, Any]:
    """The JSON schema of a suite's results, which is part of the package; ``"shared"`` is what all have."""
    return origin.schema("covpool.bench", suite)


def check_schema(results: Results) -> None:
    """Raise if the results do not follow the schema; needs jsonschema, and passes without it."""
    suite = results.get("suite")
    if suite not in SUITES:
        raise UsageError(f"results are of one of the suites {', '.join(SUITES)}; got {suite!r}")
    origin.check_schema(results, "covpool.bench", suite)


def differences(earlier: Results, now: Results) -> list[str]:
    """What keeps results of an earlier run from being continued by this one, by name.

    The sizes asked for may differ: that is what continuing is for.
    """
    named = ("schema_version", "suite", "seed", "source", "versions", "machine", "device")
    arguments = ("contenders", "steps", "dtype", "schedule")
    found = [name for name in named if earlier[name] != now[name]]
    return found + [name for name in arguments if earlier["arguments"][name] != now["arguments"][name]]
