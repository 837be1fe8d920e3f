"""The description and the links of the package, for PyPI, which does not resolve relative links.

The address of the repository comes from ``COVPOOL_REPOSITORY``, which the release workflow sets. Without it,
links stay relative and the package has no list of links.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")


class Description(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get("COVPOOL_REPOSITORY", "").rstrip("/")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, address)}
        metadata["urls"] = addresses(address) if address else {}


def absolute(text: str, address: str) -> str:
    """Return Markdown with links below the address of a repository.

    Example:
        >>> absolute("see [all](docs/a.md), [b](#b)", "https://example.org/r")
        'see [all](https://example.org/r/blob/main/docs/a.md), [b](#b)'
    """
    return LINK.sub(rf"{address}/blob/main/\1", text) if address else text


def addresses(address: str) -> dict[str, str]:
    """Return the links of the package by title."""
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
