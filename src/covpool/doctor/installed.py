"""What is installed: versions, and which extras of covpool are whole."""

from __future__ import annotations

import platform
import re
from importlib import metadata

from covpool import __version__

# Beside Python and covpool itself, those whose versions explain most of what people report.
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "pyarrow",
    "scikit-learn",
    "onnxruntime",
    "ray",
)
# They are for those who work on covpool, or nothing but the others together.
NOT_FOR_USERS = ("all", "dev")


def versions() -> dict[str, str]:
    """Of Python, covpool, and the packages that are there."""
    found = {"python": platform.python_version(), "covpool": __version__}
    return found | {name: version for name in PACKAGES if (version := _version(name)) is not None}


def missing_by_extra() -> dict[str, tuple[str, ...]]:
    """Of every extra, the packages that are not there; empty where covpool is on the path alone."""
    return {
        extra: tuple(sorted(name for name in names if _version(name) is None))
        for extra, names in sorted(_needed_by_extra().items())
        if extra not in NOT_FOR_USERS
    }


def _needed_by_extra() -> dict[str, set[str]]:
    """The packages of every extra, as the metadata have them: those of extras that it brings among them."""
    try:
        requirements = metadata.requires("covpool") or []
    except metadata.PackageNotFoundError:
        return {}
    needed: dict[str, set[str]] = {}
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == .([\w-]+)", requirement)
        if name is not None and extra is not None:
            needed.setdefault(extra[1], set()).add(name[0])
    return needed


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
