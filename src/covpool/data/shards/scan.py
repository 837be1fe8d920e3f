"""An index from the tars themselves: ours while they are written, and those of others.

A tar is only read: nothing in it is unpacked, decoded or run. What counts are plain files; links, devices and
sparse files are passed over, and so is every field but the image, its label (``.cls``, a number as text) and
what we wrote about it (``.json``).
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from covpool.data.decode import FORMAT_OF
from covpool.data.image_set import MAX_FILE_BYTES
from covpool.data.shards.index import Contents, checksum
from covpool.errors import ShardError

# By their names; what they hold is for the decoder to say. "img" is for an image whose name does not tell.
IMAGE_FIELDS = frozenset(extension[1:] for extension in FORMAT_OF) | {"img"}
MAX_FIELD_BYTES = 1 << 16  # of a label, or of what is known about an image
MAX_HEADER_BYTES = 1 << 20
MAX_CLASSES = 1_000_000
COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
ZEROS = bytes(512)  # how a tar ends


@dataclass
class Scan:
    """What was found in a tar.

    Attributes:
        contents: its samples.
        classes: names of labels, as far as the tar tells them.
        left_out: how many samples have no image or no label.
    """

    contents: Contents
    classes: dict[int, str]
    left_out: int


@dataclass
class _Sample:
    """The fields of a sample that have been met so far."""

    key: str
    seen: set[str] = field(default_factory=set)
    image: tarfile.TarInfo | None = None
    label: int | None = None
    name: str | None = None
    class_name: str | None = None


class TarImage(NamedTuple):
    """Where an image lies in a tar, and what the tar calls it."""

    name: str
    offset: int
    size: int


def find_images(path: Path) -> list[TarImage]:
    """The images of a tar, labelled or not, by its headers alone: every plain file with an image's ending.

    Dots in a name do not make it a field of another image here: ``10.32.11.png`` is an image.

    Raises:
        ShardError: where it is cut short, damaged, compressed or no tar.
    """
    _check_plain(path)
    found: dict[str, TarImage] = {}  # of two by one name the later counts, as for whoever unpacks the tar
    for member in _members(path):
        name = member.name.removeprefix("./")
        if member.isreg() and not member.issparse() and _is_image(name):
            found[name] = TarImage(name, member.offset_data, member.size)
    return list(found.values())


def _is_image(name: str) -> bool:
    """Whether a file in a tar is one; what is hidden, as macOS puts beside every file, is not."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and "." in name and name.rpartition(".")[2].lower() in IMAGE_FIELDS


def scan_tar(path: Path) -> Scan:
    """Find the samples of a tar.

    Raises:
        ShardError: where it is cut short, damaged, compressed or no tar.
    """
    _check_plain(path)
    with path.open("rb") as file:
        samples = list(_samples(path, file))
        whole = [(s, s.image, s.label) for s in samples if s.image is not None and s.label is not None]
        checksums = [_checksum(path, file, image) for _, image, _ in whole]
    contents = Contents(
        offsets=np.array([image.offset_data for _, image, _ in whole], dtype=np.int64),
        sizes=np.array([image.size for _, image, _ in whole], dtype=np.int64),
        checksums=np.array(checksums, dtype=np.int64),
        labels=np.array([label for _, _, label in whole], dtype=np.int64),
        names=tuple(_name(path, s) for s, _, _ in whole),
    )
    classes = {label: s.class_name for s, _, label in whole if s.class_name is not None}
    return Scan(contents, classes, left_out=len(samples) - len(whole))


def _name(path: Path, sample: _Sample) -> str:
    return sample.name or f"{path.name}/{sample.key}"


def _check_plain(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(6)
    for magic, command in COMPRESSED.items():
        if start.startswith(magic):
            raise ShardError(
                f"{path.name} is compressed, so no image in it can be read by itself: unpack it by {command} "
                "first (images are compressed already, and a tar of them gains nothing)"
            )


def _samples(path: Path, file: BinaryIO) -> Iterator[_Sample]:
    """The samples, each the files in a row whose names differ only after the first dot."""
    sample: _Sample | None = None
    for member in _members(path):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        if not stem or not dot:
            continue
        key, ending = folder + slash + stem, ending.lower()
        if sample is None or sample.key != key or ending in sample.seen:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        sample.seen.add(ending)
        if member.isreg() and not member.issparse():
            _take(file, sample, ending, member)
    if sample is not None:
        yield sample


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    """The headers of a tar, which must lead forward through the file and end as a tar ends."""
    length, reached = path.stat().st_size, 0
    with _Headers(io.FileIO(path)) as file:
        try:
            with tarfile.TarFile(fileobj=file) as tar:
                while (member := tar.next()) is not None:
                    stored = member.size if member.isreg() and not member.issparse() else 0
                    if member.size < 0 or tar.offset <= reached or member.offset_data + stored > length:
                        raise ShardError(f"{path.name} is cut short or damaged at {member.name!r}")
                    reached = tar.offset
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                    yield member
                end = tar.offset
        except (ShardError, OSError):
            raise
        except Exception as error:  # whatever the parsing of nonsense leads to
            raise ShardError(f"{path.name} is cut short, damaged or no tar: {error}") from error
        file.seek(end)
        if file.read(len(ZEROS)) != ZEROS:
            raise ShardError(f"{path.name} is cut short or damaged: it does not end as a tar does")


class _Headers(io.BufferedReader):
    """A tar as tarfile sees it: the size of a header may be anything, and all of it would be read."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise ShardError(f"a header of {size} bytes is none that a tar of images has")
        return super().read(size)


def _take(file: BinaryIO, sample: _Sample, ending: str, member: tarfile.TarInfo) -> None:
    """Keep what a field says."""
    if ending in IMAGE_FIELDS:
        sample.image = sample.image or member
    elif ending in ("cls", "json") and member.size <= MAX_FIELD_BYTES:
        file.seek(member.offset_data)
        data = file.read(member.size)
        if ending == "cls":
            text = data.strip()
            if text.isdigit() and len(text) < 20 and int(text) < MAX_CLASSES:
                sample.label = int(text)
        else:
            sample.name, sample.class_name = _told(data)


def _told(data: bytes) -> tuple[str | None, str | None]:
    """The image's name and its class's, where the JSON has them."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None, None
    name, class_name = (fields.get("name"), fields.get("class")) if isinstance(fields, dict) else (None, None)
    return (name if isinstance(name, str) else None), (class_name if isinstance(class_name, str) else None)


def _checksum(path: Path, file: BinaryIO, image: tarfile.TarInfo) -> int:
    """Of the image's bytes, which may be many: a size in a header can be anything."""
    if image.size > MAX_FILE_BYTES:
        return 0  # it will not be read
    file.seek(image.offset_data)
    data = file.read(image.size)
    if len(data) < image.size:
        raise ShardError(f"{path.name} is cut short at {image.name!r}")
    return checksum(data)
