"""The manifest of a folder: the name, size and SHA-256 of each of its parts, and facts about them.

Checkpoints, bulk output, feature caches and classifiers that are divided by class all use it. A manifest
detects damage. It does not stop somebody who can also rewrite the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covpool.errors import StorageError
from covpool.storage.files import digest, digest_file, open_regular, read_file

FORMAT = "covpool manifest"


@dataclass(frozen=True)
class Part:
    """The entry of a file.

    Attributes:
        bytes: its size.
        sha256: the hash of its bytes; empty for a file that is still written.
        facts: anything else to know about it, as JSON.
    """

    bytes: int
    sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def part_of(data: bytes, **facts: Any) -> Part:
    """Return the entry of a file with these bytes."""
    return Part(len(data), digest(data), facts)


@dataclass(frozen=True)
class Manifest:
    """The parts of a folder by name, and facts about all of them.

    Example:
        >>> manifest = Manifest({"rows.csv": part_of(b"id", rows=1)}, {"task": "predict"})
        >>> Manifest.read(manifest.written()) == manifest
        True
    """

    parts: Mapping[str, Part]
    about: Mapping[str, Any] = field(default_factory=dict)

    def written(self) -> bytes:
        """Return the content of the file; equal manifests give equal bytes."""
        fields = {"format": FORMAT, "about": dict(self.about), "parts": parts_to_json(self.parts)}
        return json.dumps(fields, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def read(cls, data: bytes) -> Manifest:
        """Read the content of the file.

        Raises:
            StorageError: if a byte of it has changed, or another program wrote it.
        """
        try:
            fields = json.loads(data)
            manifest = cls(parts_from_json(fields["parts"]), fields["about"])
            is_same = manifest.written() == data
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StorageError("the manifest is damaged, or covpool did not write it") from error
        if not is_same:
            raise StorageError("the manifest is damaged: covpool writes it in another form")
        return manifest


def parts_to_json(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return parts as JSON."""
    return {name: {"bytes": part.bytes, "sha256": part.sha256, **part.facts} for name, part in parts.items()}


def parts_from_json(fields: Mapping[str, Any]) -> dict[str, Part]:
    """Return the parts of :func:`parts_to_json`.

    Raises:
        StorageError: if a name would lead out of the folder.
        KeyError, TypeError, ValueError: if they are damaged.
    """
    parts = {}
    for name, entry in fields.items():
        if not is_plain(name):
            raise StorageError(f"the manifest names {name[:100]!r}, which is not a plain file name")
        facts = {key: value for key, value in entry.items() if key not in ("bytes", "sha256")}
        if type(entry["bytes"]) is not int or not 0 <= entry["bytes"] < 1 << 62:
            raise ValueError(f"{name} has no size")
        parts[name] = Part(entry["bytes"], str(entry["sha256"]), facts)
    return parts


def is_plain(name: object) -> bool:
    """Return whether a name is that of a visible file in the folder itself.

    Example:
        >>> is_plain("00000.tar"), is_plain("../x"), is_plain(".hidden"), is_plain("C:x")
        (True, False, False, False)
    """
    return isinstance(name, str) and name != "" and not name.startswith(".") and not set(name) & set("/\\\0:")


def check_part(folder: Path, name: str, part: Part) -> None:
    """Raise StorageError unless a file has the size and the hash of its entry; it is read in pieces."""
    with open_regular(folder / name, part.bytes) as file:
        if file.seek(0, 2) != part.bytes or digest_file(file) != part.sha256:
            raise StorageError(f"{name} is damaged: its size or its hash differs from the manifest")


def read_part(folder: Path, name: str, part: Part) -> bytes:
    """Return the bytes of a file, after comparing them with its entry.

    Raises:
        OSError: as :func:`covpool.storage.files.open_regular`.
        StorageError: if the file is damaged.
    """
    data = read_file(folder / name, part.bytes)
    if len(data) != part.bytes or digest(data) != part.sha256:
        raise StorageError(f"{name} is damaged: its size or its hash differs from the manifest")
    return data
