"""Counts for people."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """A number of things, in the singular where it is one.

    Example:
        >>> counted(1, "image"), counted(1200, "image"), counted(2, "class")
        ('1 image', '1,200 images', '2 classes')
    """
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"
