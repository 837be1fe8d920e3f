"""Store features on disk: computed once, read later, resumed after an interruption."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from covpool.data.image_set import ImageSet, Subset
from covpool.data.loader import BadImage
from covpool.data.look import Content, Progress, check_lasting
from covpool.errors import StorageError, UsageError
from covpool.inference.forward import Result
from covpool.storage.files import (
    MAX_TEXT_BYTES,
    create_file,
    digest_file,
    open_regular,
    read_file,
    rename_file,
    replace_file,
    sync_folder,
    update_file,
)
from covpool.storage.manifest import Manifest, Part

LOGGER = logging.getLogger("covpool")


# The index after the last of some rows, and the hash of their bytes.
Chunk = tuple[int, str]
CHUNK_BYTES = 1 << 26


def open_array(path: Path) -> np.memmap[Any, Any]:
    """Map the array of a ``.npy`` file into memory, to read it.

    Raises:
        OSError, ValueError: if the file is not a regular one, or not of such an array, or too short for it.
    """
    with open_regular(path) as file:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        version = npy.read_magic(file)
        if version not in read:
            raise ValueError(f"{path} is a .npy file of version {version}")
        shape, is_fortran, dtype = read[version](file)
        if is_fortran or dtype.hasobject:
            raise ValueError(f"{path} is not an array of numbers, row by row")
        return np.memmap(file, dtype, "r", file.tell(), shape)


def create_array(path: Path, shape: tuple[int, ...], dtype: DTypeLike, *, reserve: bool = False) -> None:
    """Make a new ``.npy`` file of zeros.

    Args:
        path: must not exist.
        shape: of the array.
        dtype: of its values.
        reserve: take the disk space now; otherwise most file systems take it when rows are written.
    """
    header = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with create_file(path) as file:
        npy.write_array_header_1_0(file, header)
        size = file.tell() + int(np.prod(shape)) * np.dtype(dtype).itemsize
        file.truncate(size)
        if reserve and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


class RowFile:
    """A ``.npy`` file of rows, read and written without mapping it into memory.

    Args:
        path: a file that :meth:`create` made.
        dtype: the type of its values.
        leading: number of leading axes that number the rows.

    Attributes:
        rows: the number of rows.
        shape: the shape of a row.
    """

    def __init__(self, path: str | Path, dtype: DTypeLike = np.float32, leading: int = 1) -> None:
        self.path, self.dtype = Path(path), np.dtype(dtype)
        mapped = open_array(self.path)
        if mapped.ndim <= leading or mapped.dtype != self.dtype or not mapped.flags.c_contiguous:
            raise UsageError(f"{path} is not an array of {self.dtype}, row by row")
        self.rows, self.shape = int(np.prod(mapped.shape[:leading])), mapped.shape[leading:]
        self._start, self._bytes = int(mapped.offset), int(np.prod(self.shape)) * self.dtype.itemsize

    @classmethod
    def create(cls, path: str | Path, *shape: int, dtype: DTypeLike = np.float32) -> RowFile:
        """Make a new file of zeros, which take no disk space on most file systems until they are written."""
        create_array(Path(path), shape, dtype)
        return cls(path, dtype)

    @property
    def columns(self) -> int:
        """The length of a row."""
        return int(self.shape[-1])

    def read(self, numbers: Iterable[int]) -> NDArray[Any]:
        """Return the rows of these numbers, in their order."""
        chosen = list(numbers)
        rows = np.empty((len(chosen), *self.shape), dtype=self.dtype)
        with open_regular(self.path) as file:
            for row, number in zip(rows, chosen, strict=True):
                file.seek(self._offset(number))
                if file.readinto(row.data) != row.nbytes:
                    raise StorageError(f"{self.path} is truncated: delete it and rerun the command")
        return rows

    def write(self, numbers: Iterable[int], rows: NDArray[Any]) -> None:
        """Write rows at these numbers."""
        with update_file(self.path) as file:
            for number, row in zip(numbers, np.ascontiguousarray(rows, dtype=self.dtype), strict=True):
                file.seek(self._offset(number))
                if file.write(row.data) != row.nbytes:
                    raise StorageError(f"{self.path} could not be written: is the disk full?")

    def digest(self, start: int, stop: int) -> str:
        """Return the hash of the bytes of the rows from ``start`` to ``stop``."""
        return digest_file(self.path, self._start + start * self._bytes, self._start + stop * self._bytes)

    def digests(self, start: int, stop: int) -> list[Chunk]:
        """Return the hashes of consecutive rows, at most 64 MB at a time."""
        step = max(1, CHUNK_BYTES // max(self._bytes, 1))
        stops = [min(first + step, stop) for first in range(start, stop, step)]
        return [(end, self.digest(begin, end)) for begin, end in pairwise([start, *stops])]

    def valid_rows(self, chunks: Sequence[Chunk]) -> int:
        """Return the number of rows, from the first, that have the hashes of before."""
        starts = [0, *(stop for stop, _ in chunks)]
        with ThreadPoolExecutor() as pool:  # hashing lets threads run at once
            digests = pool.map(self.digest, starts, starts[1:])
            for start, (_, expected), digest in zip(starts, chunks, digests, strict=False):
                if digest != expected:
                    return start
        return starts[-1]

    def sync(self) -> None:
        """Return when the rows are on the disk."""
        with update_file(self.path) as file:
            os.fsync(file.fileno())

    def _offset(self, number: int) -> int:
        if not 0 <= number < self.rows:
            raise IndexError(f"there are {self.rows} rows; got {number}")
        return self._start + int(number) * self._bytes


# Each image is stored with its horizontal flip.
VIEWS = 2
MANIFEST = "manifest.json"
# An interruption loses the work of at most this many seconds.
SECONDS_BETWEEN_SAVES = 30.0


@dataclass(frozen=True)
class State:
    """How much of an array is done.

    Attributes:
        done: the features of the images before this index are on the disk.
        bad: the unreadable images among them, by index.
        seconds: the time they took.
        chunks: hashes of the features, in their order.
    """

    done: int = 0
    bad: dict[int, BadImage] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    chunks: tuple[Chunk, ...] = ()

    def before(self, stop: int) -> State:
        """Return the state with the images before an index alone."""
        bad = {i: image for i, image in self.bad.items() if i < stop}
        return State(
            min(self.done, stop), bad, self.seconds, tuple(chunk for chunk in self.chunks if chunk[0] <= stop)
        )


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """The features of a set.

    Attributes:
        arrays: ``(images, views, ...)`` by name, on disk.
        labels: the class of every image.
        usable: the indices of the images that have features; the others are unreadable.
        seconds: the time that computing them took.
    """

    arrays: dict[str, NDArray[Any]]
    labels: NDArray[np.int64]
    usable: NDArray[np.int64]
    seconds: float


class FeatureStore:
    """A folder with the features of one set: an ``.npy`` file per array, and ``manifest.json``.

    Arrays are filled together, from the first image that one of them lacks. The caller locks the folder
    (:func:`covpool.storage.folders.held`) while it fills the store.

    Args:
        folder: need not exist.
        key: everything that the features depend on, as JSON. Features of another key are not used.
        images: the number of images.
        shapes: the shape of each array for one view of one image, by name.
        dtype: the type of the values.
    """

    def __init__(
        self,
        folder: Path,
        key: dict[str, Any],
        images: int,
        shapes: dict[str, tuple[int, ...]],
        dtype: DTypeLike = np.float16,
    ) -> None:
        self.folder, self.key, self.images = folder, json.loads(json.dumps(key)), images
        self.shapes, self.dtype = shapes, np.dtype(dtype)

    def state(self) -> State:
        """Return how much of all arrays is done."""
        states = self._states().values()
        return State(
            done=min(state.done for state in states),
            bad={i: image for state in states for i, image in state.bad.items()},
            seconds=max(state.seconds for state in states),  # arrays are filled together
        )

    def bytes(self) -> int:
        """Return the size of all arrays."""
        return sum(map(self._bytes, self.shapes))

    def missing_bytes(self) -> int:
        """Return the size of the arrays that are not on the disk yet."""
        return sum(self._bytes(name) for name in self.shapes if not self._is_there(name))

    def is_begun(self) -> bool:
        """Whether all arrays are there and belong to this key."""
        return self.shapes.keys() <= self._read().keys() and not self.missing_bytes()

    def path(self, name: str) -> Path:
        """Return the file of an array."""
        return self.folder / f"{name}.npy"

    def opened(self, labels: NDArray[np.int64]) -> CachedFeatures:
        """Return the arrays, once they are complete."""
        state = self.state()
        usable = np.setdiff1d(np.arange(self.images), np.array(sorted(state.bad), dtype=np.int64))
        arrays: dict[str, NDArray[Any]] = {name: open_array(self.path(name)) for name in self.shapes}
        return CachedFeatures(arrays, labels, usable, state.seconds)

    def check(self) -> None:
        """Read all features, and forget those that changed on the disk; :meth:`fill` computes them again."""
        cut = {}
        for name, state in self._states().items():
            valid = RowFile(self.path(name), self.dtype).valid_rows(state.chunks) if state.done else 0
            if valid < state.done:
                LOGGER.warning(
                    "%s changed after it was written: computing its features again from image %s on",
                    *(self.path(name), f"{valid:,}"),
                )
                cut[name] = state.before(valid)
        if cut:
            self._write(cut)

    def fill(
        self,
        images: ImageSet,
        content: Content,
        run: Callable[[ImageSet], Iterable[Result]],
        progress: Progress,
    ) -> None:
        """Compute the missing features, and save them regularly.

        Args:
            images: the set.
            content: digests of the set.
            run: computes the outputs of some images, in their order; the names are those of the arrays.
            progress: called with the number of images done and the total.

        Raises:
            ValueError: if an image became unreadable after it was hashed.
        """
        before = self._begin()
        files = {name: RowFile(self.path(name), self.dtype) for name in before}
        first = seen = min((state.done for state in before.values()), default=self.images)
        bad: dict[int, BadImage] = {}
        kept = {name: state.before(first) for name, state in before.items()}
        chunks = {name: list(state.chunks) for name, state in kept.items()}
        largest = float(np.finfo(self.dtype).max)
        started = saved = time.monotonic()
        for result in run(Subset(images, np.arange(first, self.images))) if first < self.images else ():
            ids, start = result.ids + first, seen
            seen += len(ids) + len(result.bad)
            missing = sorted(set(range(start, seen)) - set(ids.tolist()))
            check_lasting(images, missing, content)
            bad |= zip(missing, result.bad, strict=True)
            for name, file in files.items() if len(ids) else ():
                # Values too large for the type become its largest: a head cannot learn from infinities.
                file.write(ids, result.outputs[name].transpose(0, 1).numpy().clip(-largest, largest))
            progress(seen, self.images)
            now = time.monotonic()
            if now - saved >= SECONDS_BETWEEN_SAVES or seen == self.images:
                for name, file in files.items():
                    file.sync()
                    hashed = chunks[name][-1][0] if chunks[name] else 0
                    chunks[name] += file.digests(hashed, seen)
                self._write(
                    {
                        name: State(seen, state.bad | bad, state.seconds + now - started, tuple(chunks[name]))
                        for name, state in kept.items()
                    }
                )
                saved = now

    def _begin(self) -> dict[str, State]:
        """Make the missing arrays in full size, so that a full disk fails now; return the unfinished ones."""
        self.folder.mkdir(parents=True, exist_ok=True)
        states = self._states()
        # First: after a kill, a new array must not have the state of an old one.
        self._write(states)
        for name in self.shapes:
            if not self._is_there(name):
                self._make(name)
        sync_folder(self.folder)
        return {name: state for name, state in states.items() if state.done < self.images}

    def _make(self, name: str) -> None:
        """Under another name first: an array that another process has opened stays as it is."""
        new = self.folder / f".{name}.npy.covpool-making"
        try:
            new.unlink(missing_ok=True)  # left by a killed process
            create_array(new, self._shape(name), self.dtype, reserve=True)
            rename_file(new, self.path(name))
        finally:
            new.unlink(missing_ok=True)

    def _states(self) -> dict[str, State]:
        """Return the state of each array; nothing is done of an array that is missing or damaged."""
        read = self._read()
        return {name: read.get(name, State()) if self._is_there(name) else State() for name in self.shapes}

    def _read(self) -> dict[str, State]:
        """Return the states in the manifest, also those of arrays that this store does not use."""
        try:
            manifest = Manifest.read(read_file(self.folder / MANIFEST, MAX_TEXT_BYTES))
            parts = manifest.parts if manifest.about["key"] == self.key else {}
            return {name: _state(part.facts) for name, part in parts.items()}
        except (OSError, ValueError, KeyError, TypeError):  # no manifest, or of another program
            return {}

    def _write(self, states: dict[str, State]) -> None:
        """Write the manifest at once; the states of other arrays stay."""
        # Parts are filled in place, so each has the hashes of its chunks instead of one of its own.
        parts = {}
        for name, state in (self._read() | states).items():
            size = self.path(name).stat().st_size if self.path(name).exists() else 0
            parts[name] = Part(size, "", dataclasses.asdict(state) | {"bad": list(state.bad.items())})
        replace_file(self.folder / MANIFEST, Manifest(parts, {"key": self.key}).written())

    def _is_there(self, name: str) -> bool:
        try:
            array = open_array(self.path(name))
        except (OSError, ValueError):
            return False
        return bool(array.shape == self._shape(name) and array.dtype == self.dtype)

    def _shape(self, name: str) -> tuple[int, ...]:
        return (self.images, VIEWS, *self.shapes[name])

    def _bytes(self, name: str) -> int:
        return int(np.prod(self._shape(name))) * self.dtype.itemsize


def _state(fields: Mapping[str, Any]) -> State:
    bad = {i: BadImage(*image) for i, image in fields["bad"]}
    chunks = tuple((int(stop), str(digest)) for stop, digest in fields.get("chunks", ()))
    return State(fields["done"], bad, fields["seconds"], chunks)
