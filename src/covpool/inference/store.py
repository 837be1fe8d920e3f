"""Store features on disk: computed once, read later, resumed after an interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet, Subset
from covpool.data.loader import BadImage
from covpool.durable import replace_file, sync_folder
from covpool.errors import BadImageError, StorageError, UsageError
from covpool.inference.forward import Result
from covpool.terminal import human

Progress = Callable[[int, int], None]

# Stands for the digest of an unreadable image.
UNREADABLE = bytes(hashlib.sha256().digest_size)


class Content(NamedTuple):
    """Digests of the images of a set.

    Attributes:
        digest: the digest of all names, labels and bytes, in order.
        images: the digests of the images one after the other, zeros for unreadable images; empty for shards,
            which are not read.
    """

    digest: str
    images: bytes


def read_content(images: ImageSet, progress: Progress) -> Content:
    """Read and hash all images; shards have digests already, so they are not read."""
    if images.group_sizes() is not None:
        return Content(images.fingerprint(), b"")
    digest, each = hashlib.sha256(repr(images.classes).encode("utf-8", "surrogateescape")), bytearray()
    for i in range(len(images)):
        label = images.label(i)
        digest.update(f"{images.name(i)}\0{label}\0".encode("utf-8", "surrogateescape"))
        try:
            one = hashlib.sha256(images.read(i)).digest()
            digest.update(one)
        except (OSError, ValueError) as error:  # an unreadable image has no features either
            one = UNREADABLE
            digest.update(type(error).__name__.encode())
        each += one
        progress(i + 1, len(images))
    return Content(digest.hexdigest(), bytes(each))


def check_lasting(images: ImageSet, bad: Iterable[int], content: Content) -> None:
    """Raise if an unreadable image was readable when it was hashed.

    Features are identified by these hashes, so after one disk or network error the image would be missing
    from the stored features forever. Shards are not checked.

    Args:
        images: the set.
        bad: indices of the images without features.
        content: digests of the set.

    Raises:
        ValueError: if the bytes of an image have changed, or the image is readable again.
    """
    for i in bad if content.images else ():
        before = content.images[i * len(UNREADABLE) : (i + 1) * len(UNREADABLE)]
        try:
            data = images.read(i)
            if hashlib.sha256(data).digest() != before:
                why = "it has changed"
            else:
                decode(data)
                why = "it can be again"
        except BadImageError:
            continue
        except OSError as error:
            if before == UNREADABLE:
                continue
            why = error.strerror or str(error)
        raise UsageError(
            f"{images.name(i)} became unreadable during the run ({why}). Its results were discarded. "
            "Rerun the command to resume."
        )


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
        mapped = npy.open_memmap(self.path, mode="r")
        if mapped.ndim <= leading or mapped.dtype != self.dtype or not mapped.flags.c_contiguous:
            raise UsageError(f"{path} is not an array of {self.dtype}, row by row")
        self.rows, self.shape = int(np.prod(mapped.shape[:leading])), mapped.shape[leading:]
        self._start, self._bytes = int(mapped.offset), int(np.prod(self.shape)) * self.dtype.itemsize

    @classmethod
    def create(cls, path: str | Path, *shape: int, dtype: DTypeLike = np.float32) -> RowFile:
        """Make a new file of zeros, which take no disk space on most file systems until they are written."""
        npy.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        return cls(path, dtype)

    @property
    def columns(self) -> int:
        """The length of a row."""
        return int(self.shape[-1])

    def read(self, numbers: Iterable[int]) -> NDArray[Any]:
        """Return the rows of these numbers, in their order."""
        wanted = list(numbers)
        found = np.empty((len(wanted), *self.shape), dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            for row, number in zip(found, wanted, strict=True):
                file.seek(self._offset(number))
                if file.readinto(row.data) != row.nbytes:
                    raise StorageError(f"{self.path} is truncated: delete it and rerun the command")
        return found

    def write(self, numbers: Iterable[int], rows: NDArray[Any]) -> None:
        """Write rows at these numbers."""
        with self.path.open("r+b", buffering=0) as file:
            for number, row in zip(numbers, np.ascontiguousarray(rows, dtype=self.dtype), strict=True):
                file.seek(self._offset(number))
                if file.write(row.data) != row.nbytes:
                    raise StorageError(f"{self.path} could not be written: is the disk full?")

    def sync(self) -> None:
        """Return when the rows are on the disk."""
        with self.path.open("r+b") as file:
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
    """

    done: int = 0
    bad: dict[int, BadImage] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


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
    (:func:`covpool.durable.held`) while it fills the store.

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
        arrays: dict[str, NDArray[Any]] = {
            name: npy.open_memmap(self.path(name), "r") for name in self.shapes
        }
        return CachedFeatures(arrays, labels, usable, state.seconds)

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
        started = saved = time.monotonic()
        for result in run(Subset(images, np.arange(first, self.images))) if first < self.images else ():
            ids, start = result.ids + first, seen
            seen += len(ids) + len(result.bad)
            missing = sorted(set(range(start, seen)) - set(ids.tolist()))
            check_lasting(images, missing, content)
            bad |= zip(missing, result.bad, strict=True)
            for name, file in files.items() if len(ids) else ():
                file.write(ids, self._rows(result.outputs[name].transpose(0, 1).numpy()))
            progress(seen, self.images)
            now = time.monotonic()
            if now - saved >= SECONDS_BETWEEN_SAVES or seen == self.images:
                for file in files.values():
                    file.sync()
                self._write(
                    {name: _add(state, first, seen, bad, now - started) for name, state in before.items()}
                )
                saved = now

    def _rows(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Values too large for the type become its largest: a head cannot learn from infinities."""
        largest = float(np.finfo(self.dtype).max)
        return values.clip(-largest, largest).astype(self.dtype)

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
            npy.open_memmap(new, "w+", self.dtype, self._shape(name)).flush()
            with open(new, "r+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            os.replace(new, self.path(name))
        finally:
            new.unlink(missing_ok=True)

    def _states(self) -> dict[str, State]:
        """Return the state of each array; nothing is done of an array that is missing or damaged."""
        read = self._read()
        return {name: read.get(name, State()) if self._is_there(name) else State() for name in self.shapes}

    def _read(self) -> dict[str, State]:
        """Return the states in the manifest, also those of arrays that this store does not use."""
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            arrays = manifest["arrays"] if manifest["key"] == self.key else {}
            return {
                name: State(one["done"], {i: BadImage(*image) for i, image in one["bad"]}, one["seconds"])
                for name, one in arrays.items()
            }
        except (OSError, ValueError, KeyError, TypeError):  # no manifest, or of another program
            return {}

    def _write(self, states: dict[str, State]) -> None:
        """Write the manifest at once; the states of other arrays stay."""
        arrays = {
            name: {"done": state.done, "bad": list(state.bad.items()), "seconds": state.seconds}
            for name, state in (self._read() | states).items()
        }
        manifest = {"key": self.key, "arrays": arrays}
        replace_file(self.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())

    def _is_there(self, name: str) -> bool:
        try:
            array = npy.open_memmap(self.path(name), "r")
        except (OSError, ValueError):
            return False
        return array.shape == self._shape(name) and array.dtype == self.dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        return (self.images, VIEWS, *self.shapes[name])

    def _bytes(self, name: str) -> int:
        return int(np.prod(self._shape(name))) * self.dtype.itemsize


def _add(state: State, first: int, done: int, bad: dict[int, BadImage], seconds: float) -> State:
    kept = {i: image for i, image in state.bad.items() if i < first}
    return State(done, kept | bad, state.seconds + seconds)


def check_room(folder: Path, size: int, what: str, option: str) -> None:
    """Raise if a disk has too little free space for the features.

    Args:
        folder: a folder on that disk.
        size: number of bytes needed.
        what: beginning of the message, on the size.
        option: the option that names another folder.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UsageError(f"{what}, and {folder} has {human(free, 'B')} free: give another {option}")
