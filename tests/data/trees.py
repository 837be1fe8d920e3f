"""Folders of images, created for a test."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tests.data.pictures import jpeg


def colour(text: str) -> tuple[int, int, int]:
    """Return a color that depends on the text."""
    red, green, blue = hashlib.sha256(text.encode()).digest()[:3]
    return red, green, blue


def plant(root: Path, *names: str) -> Path:
    """Write files under a folder: images, each in its own color, and text files."""
    for name in names:
        write(root / name, jpeg(colour(name)) if Path(name).suffix in (".jpg", ".JPG", ".jpeg") else b"text")
    return root


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def digests(root: Path) -> Mapping[str, tuple[str, int, int, int]]:
    """Return the content, permissions and change times of every file and folder under ``root``."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        times = status.st_mtime_ns, status.st_ctime_ns
        found[str(path.relative_to(root))] = (content, status.st_mode, *times)
    return found
