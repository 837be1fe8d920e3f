"""What is written must not go among the images, where it would be taken for some of them the next time."""

from __future__ import annotations

from pathlib import Path


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Whether a local path lies in a local folder, links followed; there need not be anything at the path.

    Example:
        >>> is_inside("rows", "."), is_inside("../rows", "."), is_inside(".", ".")
        (True, False, False)
    """
    return folder != "" and Path(folder).is_dir() and Path(folder).resolve() in Path(path).resolve().parents


def check_outside(path: str | Path, data: str | Path, what: str, option: str = "--out") -> None:
    """Raise if a path lies in the folder of the images.

    Args:
        path: where something is to be written.
        data: the images; a file or an address of a store holds nothing else.
        what: would be written, in the plural.
        option: of the path.
    """
    if is_inside(path, data):
        raise ValueError(f"{what} would go into the images themselves, as {path} is in {data}: give {option}")
