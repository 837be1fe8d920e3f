"""The release that results belong to, which has a folder of theirs."""

from __future__ import annotations

import re

from covpool import __version__


def release(version: str = __version__) -> str:
    """The release a version leads to: ``0.2.0`` of ``0.2.0.dev7``, and of ``0.2.0`` itself.

    Example:
        >>> from covpool.provenance.release import release
        >>> release("0.2.0.dev7")
        '0.2.0'
    """
    number = re.match(r"\d+(\.\d+)*", version)
    if number is None:
        raise ValueError(f"a version begins with its number; got {version!r}")
    return number.group()
