"""Write result files that carry their origin, and validate them against a schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module, resources
from importlib.util import find_spec
from typing import Any

from covpool.provenance.machine import (
    describe_machine,
    describe_source,
    describe_versions,
)
from covpool.storage.files import package_text

Results = dict[str, Any]
# The package with the schema of what all results have in common.
ORIGIN = "covpool.provenance"


def new_results(packages: Sequence[str], arguments: dict[str, Any], device: str, seed: int | None) -> Results:
    """Return the entries that all results have: code, arguments, versions and machine.

    Args:
        packages: packages of covpool that the results depend on.
        arguments: of the command or function.
        device: kind of device, such as ``cpu``.
        seed: random seed; ``None`` if nothing is random.
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
