"""The version: of an installed wheel its own, of a checkout the release that it is on the way to."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

# A checkout does not count its commits: what it was installed at is soon not what it holds. Results carry the
# commit. The number is in pyproject.toml, CITATION.cff and CHANGELOG.md too, and a test compares them.
OF_A_CHECKOUT = "0.1.0.dev0"


def version_in(folder: Path) -> str:
    """Of the package in a folder, whatever covpool may be installed elsewhere.

    A wheel's metadata is unpacked beside the package; an editable install leaves none there.
    """
    for installed in metadata.distributions(name="covpool", path=[str(folder)]):
        return installed.version
    return OF_A_CHECKOUT
