"""What a build adds: the description and the links for PyPI, the help, and a software bill of materials.

PyPI does not resolve relative links. The address of the repository comes from ``COVPOOL_REPOSITORY``, which
the release workflow sets. Without it, links stay relative and the package has no list of links.

``COVPOOL_HELP`` names the help of all verbs, a file by ``python -m lab.write_help``. It becomes
``covpool/cli/help.txt``. Without it, ``covpool VERB --help`` makes the text, which takes seconds.

The bill is ``*.dist-info/sboms/covpool.cdx.json`` in the wheel (PEP 770, CycloneDX). The wheel contains no
code of others, so the bill lists the package and its requirements. The same sources give the same file.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FILE = "covpool.cdx.json"
HELP = "covpool/cli/help.txt"
LINK = re.compile(r"(!\[[^\]]*\]\(|\]\()(?![a-z]+:|#)([^)\s]+)")


class Description(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get("COVPOOL_REPOSITORY", "").rstrip("/")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, address)}
        metadata["urls"] = addresses(address) if address else {}


def absolute(text: str, address: str) -> str:
    """Return Markdown with links and pictures below the address of a repository.

    Example:
        >>> absolute("see [all](docs/a.md), [b](#b), ![c](c.png)", "https://example.org/r")
        'see [all](https://example.org/r/blob/main/docs/a.md), [b](#b), ![c](https://example.org/r/raw/main/c.png)'
    """

    def target(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{address}/{kind}/main/{link[2]}"

    return LINK.sub(target, text) if address else text


def addresses(address: str) -> dict[str, str]:
    """Return the links of the package by title."""
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class Additions(BuildHookInterface):  # type: ignore[type-arg]
    """Add the help to an sdist and a wheel, and the bill to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the bill and name the help, before the archive is made."""
        if version == "editable":
            return
        text = os.environ.get("COVPOOL_HELP")
        if text and not Path(self.root, "src", HELP).exists():  # an unpacked sdist has it
            build_data["force_include"][text] = HELP if self.target_name == "wheel" else f"src/{HELP}"
        if self.target_name != "wheel":
            return
        core = self.metadata.core
        extras = {name: list(required) for name, required in core.optional_dependencies.items()}
        text = bill(self.metadata.version, core.dependencies, extras)
        path = Path(self.directory, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        build_data["sbom_files"].append(os.path.relpath(path, self.root))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the bill, which is in the wheel now."""
        Path(self.directory, FILE).unlink(missing_ok=True)


def bill(version: str, required: list[str], extras: dict[str, list[str]]) -> str:
    """Return the contents of the file."""
    own = f"pkg:pypi/covpool@{version}"
    parts: dict[str, dict[str, Any]] = {}
    for extra, requirements in {"": required, **extras}.items():
        for requirement in requirements:
            name = re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            if name == "covpool" or extra in ("dev", "docs"):
                continue
            part = parts.setdefault(
                name,
                {
                    "type": "library",
                    "bom-ref": f"pkg:pypi/{name}",
                    "name": name,
                    "purl": f"pkg:pypi/{name}",
                    "scope": "optional",
                    "properties": [],
                },
            )
            part["scope"] = "optional" if extra and part["scope"] == "optional" else "required"
            part["properties"].append({"name": f"covpool:{extra or 'required'}", "value": requirement})
    components = [parts[name] for name in sorted(parts)]
    fields = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": "covpool",
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [part["bom-ref"] for part in components]}],
    }
    return json.dumps(fields, indent=2) + "\n"
