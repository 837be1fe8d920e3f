"""Describe the code, versions and machine of a result, and write result files that carry them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from covpool import __version__
from covpool.device import available_cores, cpu_flags, cpu_info, device_name, toolkit_versions
from covpool.errors import UsageError
from covpool.storage.files import MAX_TEXT_BYTES, Digest, package_text, read_file

PACKAGE = Path(__file__).resolve().parents[1]
# Parts of CPU model names that do not distinguish CPUs.
_NOISE_WORDS = re.compile(r"\((r|tm)\)|\b(intel|amd|cpu|processor|\d+-core)\b|@.*$|,.*$", re.IGNORECASE)
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "LD_PRELOAD",
)


def describe_source(packages: Sequence[str]) -> dict[str, Any]:
    """Return the commit, whether the code differs from it, and a digest of some packages of covpool.

    The digest makes resuming a run safe: uncommitted changes alter the code but not the commit.
    """
    changes = _git("status", "--porcelain", "--", str(PACKAGE))
    return {
        "commit": _git("rev-parse", "HEAD") or None,
        "dirty": None if changes is None else changes != "",
        "digest": _digest(packages),
    }


def describe_versions() -> dict[str, Any]:
    """Return the versions of Python, torch, covpool and torch's BLAS, and torch's matmul precision."""
    blas = [line.strip("- ").strip() for line in torch.__config__.show().splitlines() if "MKL" in line]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "covpool": __version__,
        **toolkit_versions(),
        "blas": [line for line in blas if not line.startswith("Build settings")],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def describe_machine(device: str) -> dict[str, Any]:
    """Return CPU, cores, threads, memory, instruction sets, and the GPU if it is the device."""
    cpu = cpu_info()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "flags": list(cpu_flags()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "gpu": None if device == "cpu" else device_name(device),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def machine_name(machine: dict[str, Any]) -> str:
    """Return a short name for file names: ``xeon-amx-2c``, or the name of the GPU."""
    if machine["gpu"] is not None:
        return _slug(machine["gpu"])
    amx = ["amx"] if "amx_tile" in machine["flags"] else []
    model = _slug(_NOISE_WORDS.sub(" ", machine["cpu"])) or _slug(machine["cpu"]) or "cpu"
    # A machine limited to fewer threads than cores performs like a smaller one.
    used = min(machine["cores"], machine["threads"])
    return "-".join([model, *amx, f"{used}c"])


def release(version: str = __version__) -> str:
    """Return the release of a version: ``0.2.0`` for ``0.2.0.dev7`` and for ``0.2.0``.

    Example:
        >>> from covpool.provenance import release
        >>> release("0.2.0.dev7")
        '0.2.0'
    """
    number = re.match(r"\d+(\.\d+)*", version)
    if number is None:
        raise UsageError(f"a version begins with a number; got {version!r}")
    return number.group()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _digest(packages: Sequence[str]) -> str:
    digest = Digest()
    for package in packages:
        folder = PACKAGE / package
        for path in sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]:
            digest.update(path.relative_to(PACKAGE).as_posix().encode())
            digest.update(read_file(path, MAX_TEXT_BYTES))
    return digest.hexdigest()[:16]


def _slug(words: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", words.lower()))


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return round(total / 2**30, 1)


Results = dict[str, Any]
# The package with the schema of what all results have in common.
ORIGIN = "covpool.provenance"


def new_results(packages: Sequence[str], arguments: dict[str, Any], device: str, seed: int | None) -> Results:
    """Return the entries that all results have: code, arguments, versions and machine."""
    return {
        "schema_version": 1,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seed": seed,
        "source": describe_source(packages),
        "versions": describe_versions(),
        "machine": describe_machine(device),
        "device": device,
        "arguments": arguments,
    }


def schema(package: str, name: str) -> dict[str, Any]:
    """Load a JSON schema of a subpackage of covpool."""
    loaded: dict[str, Any] = json.loads(package_text(package, "schemas", f"{name}.json"))
    return loaded


def check_schema(results: Results, package: str, name: str) -> None:
    """Raise if results do not follow a schema; without jsonschema installed, do nothing.

    Schemas refer to others of their package, and to ``origin.json``, by file name.
    """
    if find_spec("jsonschema") is None:
        return
    referencing = import_module("referencing")  # a dependency of jsonschema
    others = [
        (file.name, referencing.Resource.from_contents(json.loads(package_text(place, "schemas", file.name))))
        for place in (ORIGIN, package)
        for file in resources.files(place).joinpath("schemas").iterdir()
    ]
    registry = referencing.Registry().with_resources(others)
    import_module("jsonschema").validate(results, schema(package, name), registry=registry)
