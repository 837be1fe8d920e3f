"""Scan tars for their samples: tars written by covpool and WebDataset tars from elsewhere.

A tar is only read: nothing in it is unpacked, decoded or run. Only regular files are used; links, devices and
sparse files are skipped. The scan reads three fields per sample: the image, its label (``.cls``, an integer
as text) and the metadata that covpool writes (``.json``).
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
from covpool.data.shards.index import Contents, checksum
from covpool.errors import ShardError
from covpool.storage.address import MAX_FILE_BYTES
from covpool.storage.files import open_regular

# By file extension; the decoder finds the actual format. "img" is for an image without a known extension.
IMAGE_FIELDS = frozenset(extension[1:] for extension in FORMAT_OF) | {"img"}
MAX_FIELD_BYTES = 1 << 16  # of a label or of an image's metadata
MAX_HEADER_BYTES = 1 << 20  # of all headers of a file in the tar
MAX_GLOBAL_FIELDS = 1000
MAX_CLASSES = 1_000_000
COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
ZEROS = bytes(512)  # how a tar ends


@dataclass
class Scan:
    """The result of scanning a tar.

    Attributes:
        contents: the samples.
        classes: class names by label, for the labels that the tar names.
        left_out: number of samples without an image or a label.
    """

    contents: Contents
    classes: dict[int, str]
    left_out: int


@dataclass
class _Sample:
    """The fields of a sample that have been read so far."""

    key: str
    seen: set[str] = field(default_factory=set)
    image: tarfile.TarInfo | None = None
    label: int | None = None
    name: str | None = None
    class_name: str | None = None


class TarImage(NamedTuple):
    """The name, offset and size of an image in a tar."""

    name: str
    offset: int
    size: int


def find_images(path: Path) -> list[TarImage]:
    """Return the images of a tar, with or without labels: every regular file with an image extension.

    Only headers are read. A name with dots, such as ``10.32.11.png``, is one image, not a WebDataset field.

    Raises:
        ShardError: if the file is truncated, damaged, compressed or not a tar.
    """
    _check_plain(path)
    images: dict[str, TarImage] = {}  # the last of two equal names is used, as when unpacking
    for member in _members(path):
        name = member.name.removeprefix("./")
        if member.isreg() and not member.issparse() and _is_image(name):
            images[name] = TarImage(name, member.offset_data, member.size)
    return list(images.values())


def _is_image(name: str) -> bool:
    """Return whether a file name is that of an image; hidden files, such as those of macOS, are not."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and "." in name and name.rpartition(".")[2].lower() in IMAGE_FIELDS


def scan_tar(path: Path) -> Scan:
    """Find the samples of a tar.

    Raises:
        ShardError: if the file is truncated, damaged, compressed or not a tar.
    """
    _check_plain(path)
    with io.BufferedReader(open_regular(path)) as file:
        samples = list(_samples(path, file))
        whole = [(s, s.image, s.label) for s in samples if s.image is not None and s.label is not None]
        checksums = [_checksum(path, file, image) for _, image, _ in whole]
    contents = Contents(
        offsets=np.array([image.offset_data for _, image, _ in whole], dtype=np.int64),
        sizes=np.array([image.size for _, image, _ in whole], dtype=np.int64),
        checksums=np.array(checksums, dtype=np.int64),
        labels=np.array([label for _, _, label in whole], dtype=np.int64),
        names=tuple(s.name or f"{path.name}/{s.key}" for s, _, _ in whole),
    )
    classes = {label: s.class_name for s, _, label in whole if s.class_name is not None}
    return Scan(contents, classes, left_out=len(samples) - len(whole))


def _check_plain(path: Path) -> None:
    with open_regular(path) as file:
        start = file.read(6)
    for magic, command in COMPRESSED.items():
        if start.startswith(magic):
            raise ShardError(
                f"{path.name} is compressed, so single images cannot be read from it: decompress it with "
                f"{command} first (compressing a tar of images saves almost nothing)"
            )


def _samples(path: Path, file: BinaryIO) -> Iterator[_Sample]:
    """Yield the samples: consecutive files whose names differ only after the first dot."""
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
    """Yield the headers of a tar; check that they advance through the file and that the tar is complete."""
    reached = 0
    with _Headers(open_regular(path)) as file:
        try:
            with tarfile.TarFile(fileobj=file) as tar:
                while (member := tar.next()) is not None:
                    file.left = MAX_HEADER_BYTES
                    if len(tar.pax_headers) > MAX_GLOBAL_FIELDS:  # tarfile copies them for every member
                        raise ShardError(f"{path.name} has too many global header fields")
                    if member.size < 0 or tar.offset <= reached:  # tarfile notices an end that is missing
                        raise ShardError(f"{path.name} is truncated or damaged at {member.name!r}")
                    reached = tar.offset
                    tar.members.clear()  # type: ignore[attr-defined]  # or tarfile keeps every header
                    yield member
                end = tar.offset
        except (ShardError, OSError):
            raise
        except Exception as error:  # tarfile raises many kinds for invalid data
            raise ShardError(f"{path.name} is truncated, damaged or not a tar: {error}") from error
        file.seek(end)
        file.left = MAX_HEADER_BYTES
        if file.read(len(ZEROS)) != ZEROS:
            raise ShardError(f"{path.name} is truncated or damaged: its end marker is missing")


class _Headers(io.BufferedReader):
    """A reader for tarfile that limits the headers of a member; forged ones could exhaust the memory.

    Attributes:
        left: bytes that the headers of the next member may still have.
    """

    left = MAX_HEADER_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= self.left:
            raise ShardError(f"a tar header of {size} bytes is too large")
        self.left -= size
        return super().read(size)


def _take(file: BinaryIO, sample: _Sample, ending: str, member: tarfile.TarInfo) -> None:
    """Store a field of a sample."""
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
            sample.name, sample.class_name = _read_json(data)


def _read_json(data: bytes) -> tuple[str | None, str | None]:
    """Return the names of the image and its class, each ``None`` if the JSON lacks it."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None, None
    name, class_name = (fields.get("name"), fields.get("class")) if isinstance(fields, dict) else (None, None)
    return (name if isinstance(name, str) else None), (class_name if isinstance(class_name, str) else None)


def _checksum(path: Path, file: BinaryIO, image: tarfile.TarInfo) -> int:
    """Return the checksum of an image; 0 if its size in the header is over the limit."""
    if image.size > MAX_FILE_BYTES:
        return 0  # images of this size are never read
    file.seek(image.offset_data)
    data = file.read(image.size)
    if len(data) < image.size:
        raise ShardError(f"{path.name} is truncated at {image.name!r}")
    return checksum(data)
