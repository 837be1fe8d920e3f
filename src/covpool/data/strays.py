"""Images under a folder that no class has: in the wrong place, or under names that are none of an image's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from covpool.data.signature import BEGINNING, EXTENSIONS, format_of
from covpool.data.sources.folder import is_image, is_visible, split_folders

NOT_IMAGES = ("a web page", "a Git LFS pointer", "PDF", "SVG")
# These begin as TIFF does, and called so would give their preview.
RAW = (".arw", ".cr2", ".dng", ".nef", ".nrw", ".pef", ".sr2", ".srw")


def strays(root: Path) -> Iterator[tuple[str, str, str]]:
    """Path, problem and detail of each image that a folder of classes has and does not use."""
    splits = set(split_folders(root).values())
    tops = {"", *splits}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(filter(is_visible, folders))
        inside = os.path.relpath(folder, root).replace(os.sep, "/").removeprefix(".")
        for name in sorted(filter(is_visible, files)):
            path = "/".join(filter(None, (inside, name)))
            if not is_image(name):
                yield from _renamed(root, path)
            elif inside in tops:
                yield path, "no class", "it is in no folder of a class"
            elif splits and inside.partition("/")[0] not in splits:
                yield path, "no class", f"it is in none of {', '.join(sorted(splits))}"


def _renamed(root: Path, path: str) -> Iterator[tuple[str, str, str]]:
    try:
        with open(root / path, "rb") as file:
            image_format = format_of(file.read(BEGINNING))
    except OSError:
        return
    if image_format == "TIFF" and path.lower().endswith(RAW):
        image_format = "a camera's raw file"
    if image_format in EXTENSIONS:
        yield path, "not read", f"it is {image_format}, and should end in {EXTENSIONS[image_format][0]}"
    elif image_format is not None and image_format not in NOT_IMAGES:
        yield path, "not read", f"it is {image_format}; what is read is {', '.join(EXTENSIONS)}"
