"""Write result files that carry their origin, and validate them against a schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covpool.provenance.machine import (
    describe_machine,
    describe_source,
    describe_versions,
    machine_name,
    release,
)

Results = dict[str, Any]
# Of its schemas, what all results have.
ORIGIN = "covpool.provenance"


def new_results(packages: Sequence[str], arguments: dict[str, Any], device: str, seed: int | None) -> Results:
    """Describe code, options, versions and machine; the results depend on ``packages`` of covpool.

    ``seed`` is ``None`` where nothing comes by chance.
    """
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
    """A JSON schema that is part of a package of ours."""
    file = resources.files(package).joinpath("schemas", f"{name}.json")
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def check_schema(results: Results, package: str, name: str) -> None:
    """Raise if results do not follow a schema; needs jsonschema, and passes without it.

    Schemas refer to others of their package, and to ``origin.json``, by the names of their files.
    """
    if find_spec("jsonschema") is None:
        return
    referencing = import_module("referencing")  # which jsonschema brings along
    others = [
        (file.name, referencing.Resource.from_contents(json.loads(file.read_text(encoding="utf-8"))))
        for place in (ORIGIN, package)
        for file in resources.files(place).joinpath("schemas").iterdir()
    ]
    registry = referencing.Registry().with_resources(others)
    import_module("jsonschema").validate(results, schema(package, name), registry=registry)


def results_path(out: str | Path, name: str, results: Results) -> Path:
    """Of results that begin as :func:`covpool.provenance.results.new_results` has it."""
    file = f"{name}--{machine_name(results['machine'])}--{results['device']}.json"
    return Path(out) / release(str(results["versions"]["covpool"])) / file


def results_file(folder: Path, name: str) -> Path | None:
    """What a page shows of a release: of several machines' files the first by name, ``None`` without any."""
    return min(folder.glob(f"{name}--*.json"), default=None)
