"""The index of tar shards: where in its tar each image lies, its label and its name.

A folder of shards holds the tars, ``00000.tar``, beside each a ``00000.tar.json`` on what is in it, and one
``index.json`` on all of them: the classes, of each tar its size, its number of samples and the SHA-256 of
its ``.json``, and how many samples of the tars were left out. All is plain JSON. A tar, or a ``.json``, that
changed after it was indexed is refused.

This file knows the format; :mod:`covpool.data.shards.write` makes an index from tars.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covpool.errors import ShardError

FORMAT, VERSION = "covpool shards", 1
INDEX = "index.json"
# Larger files than these are not ours: an index of a million shards has about 200 MB.
MAX_INDEX_BYTES, MAX_CONTENTS_BYTES = 1 << 28, 1 << 28
COLUMNS = ("offsets", "sizes", "checksums", "labels")


@dataclass(frozen=True)
class Shard:
    """A tar as its index knows it.

    Attributes:
        name: of the tar's file.
        bytes: its size.
        samples: how many it holds.
        contents: the SHA-256 of the ``.json`` beside it.
    """

    name: str
    bytes: int
    samples: int
    contents: str


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a set; what ``index.json`` holds.

    Attributes:
        classes: their names, in the order of the labels.
        shards: in the order in which their samples are numbered.
        left_out: samples in the tars that have no image or no label, so that the index is without them.
    """

    classes: tuple[str, ...]
    shards: tuple[Shard, ...]
    left_out: int = 0

    @property
    def counts(self) -> list[int]:
        """The samples in each shard."""
        return [shard.samples for shard in self.shards]


@dataclass(frozen=True, eq=False)
class Contents:
    """What is in one tar, sample by sample.

    Attributes:
        offsets: of the first byte of each image.
        sizes: in bytes.
        checksums: by :func:`checksum` of each image's bytes.
        labels: as numbers.
        names: where the image came from, for people.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: tuple[str, ...]


def write_index(index: ShardIndex) -> bytes:
    """The bytes of ``index.json``."""
    shards = [asdict(shard) for shard in index.shards]
    return _write(classes=list(index.classes), shards=shards, left_out=index.left_out)


def read_index(data: bytes) -> ShardIndex:
    """The index in the bytes of an ``index.json``.

    Raises:
        ShardError: with a sentence on what is wrong with it.
    """
    kinds = {"classes": list, "shards": list, "left_out": int}
    fields = _read(INDEX, data, kinds, MAX_INDEX_BYTES, {"left_out": 0})
    if not all(isinstance(name, str) for name in fields["classes"]):
        raise ShardError(f"{INDEX} has a class whose name is no text")
    return ShardIndex(tuple(fields["classes"]), tuple(map(_shard, fields["shards"])), fields["left_out"])


def write_contents(contents: Contents) -> bytes:
    """The bytes of the ``.json`` beside a tar."""
    columns = {name: getattr(contents, name).tolist() for name in COLUMNS}
    return _write(**columns, names=list(contents.names))


def read_contents(data: bytes, shard: Shard, classes: int) -> Contents:
    """What is in a tar, by the bytes of the ``.json`` beside it, which are checked against the index.

    Raises:
        ShardError: with a sentence on what is wrong.
    """
    where = f"{shard.name}.json"
    if digest(data) != shard.contents:
        raise ShardError(f"{where} is not the one that {INDEX} was made with; {remedy()}")
    fields = _read(where, data, dict.fromkeys((*COLUMNS, "names"), list), MAX_CONTENTS_BYTES)
    if {len(column) for column in fields.values()} != {shard.samples}:
        raise ShardError(f"{where} has not {shard.samples} samples, as {INDEX} says; {remedy()}")
    if not all(isinstance(name, str) for name in fields["names"]):
        raise ShardError(f"{where} has a sample whose name is no text")
    columns = {name: _numbers(where, name, fields[name]) for name in COLUMNS}
    # As Python numbers first: the sum of two large ones must not wrap around.
    if (columns["offsets"] > shard.bytes).any() or (
        columns["sizes"] > shard.bytes - columns["offsets"]
    ).any():
        raise ShardError(f"{where} has an image that lies outside of its tar")
    if (columns["labels"] >= classes).any():
        raise ShardError(f"{where} has a label past the {classes} classes of {INDEX}")
    return Contents(**columns, names=tuple(fields["names"]))


def checksum(data: bytes) -> int:
    """The exclusive or of the bytes, taken four at a time as a number from low to high.

    It tells other bytes, a part lost and a flipped bit. A CRC-32 would take longer than reading does.

    Example:
        >>> checksum(bytes([1, 2])), checksum(bytes([1, 2, 0, 0, 3])), checksum(b"1234" * 2)
        (513, 514, 0)
    """
    words = np.frombuffer(data, dtype="<u8", count=len(data) // 8)
    both = int(np.bitwise_xor.reduce(words)) ^ int.from_bytes(data[8 * len(words) :], "little")
    return (both ^ both >> 32) & 0xFFFFFFFF


def digest(data: bytes) -> str:
    """The SHA-256 by which ``index.json`` knows the ``.json`` beside a tar."""
    return hashlib.sha256(data).hexdigest()


def remedy() -> str:
    """What to do about an index that does not fit."""
    return "'covpool shard --index' makes a new one from the tars"


def _write(**fields: Any) -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION, **fields}, separators=(",", ":")).encode()


def _read(
    where: str, data: bytes, kinds: Mapping[str, type], limit: int, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of our JSON, each of its kind; those with defaults were not always written."""
    if len(data) > limit:
        raise ShardError(f"{where} has {len(data):,} bytes, too many for an index of shards")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{where} is cut short or damaged: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ShardError(f"{where} is no index of shards that covpool has written")
    if fields.get("version") != VERSION:
        raise ShardError(f"{where} is of version {fields.get('version')}; this covpool reads {VERSION}")
    fields = {**(defaults or {}), **fields}
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            raise ShardError(f"{where} has no {name}")
    return {name: fields[name] for name in kinds}


def _shard(fields: object) -> Shard:
    kinds = Shard.__annotations__
    if not isinstance(fields, dict) or fields.keys() != kinds.keys():
        raise ShardError(f"{INDEX} has a shard without its {', '.join(kinds)}")
    name, numbers = fields["name"], (fields["bytes"], fields["samples"])
    # The name becomes part of a path, so it may not lead elsewhere.
    if not isinstance(name, str) or not name or name.startswith(".") or set(name) & set("/\\\0:"):
        raise ShardError(f"{INDEX} has a shard named {name!r}, which is no name of a file beside it")
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise ShardError(f"{INDEX} has no size or no number of samples for {name}")
    if not isinstance(fields["contents"], str):
        raise ShardError(f"{INDEX} has no SHA-256 for {name}")
    return Shard(**fields)


def _numbers(where: str, name: str, column: Sequence[object]) -> NDArray[np.int64]:
    if any(type(value) is not int or not 0 <= value < 2**62 for value in column):
        raise ShardError(f"{where} has {name} that are no whole numbers from 0 on")
    return np.array(column, dtype=np.int64)
