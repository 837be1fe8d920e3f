"""Read every image of a data set: find problems and duplicates, and hash the content."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from covpool.data.decode import EXTENSIONS, FORMAT_OF, decode, format_of
from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.sources import Split
from covpool.errors import BadImageError, UsageError
from covpool.storage.files import Digest

NO_LOCK: AbstractContextManager[object] = nullcontext()
DIGEST_BYTES = 16
SAMPLES = (16, 16)
# Of 255. 12-bit gray in a 16-bit file is darker, and so is a photo with the lens cap on.
DARK = 16


class Look(NamedTuple):
    """The result of checking an image.

    Attributes:
        problem: short name of the problem; empty if there is none.
        detail: the problem in a sentence.
        content: digest of the file's bytes; empty if the image is unreadable.
        samples: digest of the size and of some pixels. It is cheap, and equal for equal images.
    """

    problem: str
    detail: str
    content: bytes = b""
    samples: bytes = b""


def look(images: ImageSet, i: int, lock: AbstractContextManager[object] = NO_LOCK) -> Look:
    """Read an image while holding the lock, decode it, and compare its format with its extension."""
    try:
        with lock:
            data, name = images.read(i), images.name(i)
        picture = decode(data)
    except BadImageError as error:
        return Look(error.reason, str(error))
    except FileNotFoundError:
        return Look("missing", "the file does not exist")
    except OSError as error:
        return Look("unreadable", error.strerror or str(error))
    content = Digest(data).digest()[:DIGEST_BYTES]
    samples = picture.resize(SAMPLES, Image.Resampling.NEAREST)
    problem = _darkness(picture) or _name_problem(name, data)
    return Look(*problem, content, _digest(picture, samples))


def pixels(images: ImageSet, i: int) -> bytes:
    """Return a digest of all pixels of a readable image."""
    picture = decode(images.read(i))
    return _digest(picture, picture)


def _digest(picture: Image.Image, part: Image.Image) -> bytes:
    text = f"{picture.width}x{picture.height}:".encode()
    return Digest(text + part.tobytes()).digest()[:DIGEST_BYTES]


def _darkness(picture: Image.Image) -> tuple[str, str] | None:
    """Return the problem if the image is nearly black."""
    brightest = max(high for _, high in picture.getextrema())  # type: ignore[misc]
    if brightest >= DARK:
        return None
    return "black", f"its brightest value is {brightest} of 255"


def _name_problem(name: str, data: bytes) -> tuple[str, str]:
    """Return the problem if the extension is that of another format."""
    extension = os.path.splitext(name)[1].lower()
    called, is_really = FORMAT_OF.get(extension), format_of(data)
    if called in (None, is_really) or is_really is None:
        return "", ""
    return "extension", f"it is {is_really}: rename it to end in {EXTENSIONS[is_really][0]}"


Digests = NDArray[np.uint8]  # one row per image


def same_images(content: Digests, samples: Digests, pixels: Callable[[int], bytes]) -> Digests:
    """Return a digest per image that is equal for images with equal pixels.

    Files with equal bytes are equal images. All pixels are compared only for the few other images whose
    sampled pixels agree.

    Args:
        content: digests of the files' bytes.
        samples: digests of a few pixels.
        pixels: function that returns the digest of all pixels of an image.
    """
    result = content.copy()
    for group in groups_of_equals(samples):
        files, first, which = np.unique(content[group], axis=0, return_index=True, return_inverse=True)
        if len(files) > 1:
            digests = [np.frombuffer(pixels(int(i)), dtype=np.uint8) for i in group[first]]
            result[group] = np.stack(digests)[which.reshape(-1)]
    return result


def groups_of_equals(digests: Digests) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of each group of two or more equal rows, in ascending order."""
    if not len(digests):
        return
    words = np.ascontiguousarray(digests).view(np.uint64)
    order = np.lexsort(words.T)
    is_new = np.any(words[order][1:] != words[order][:-1], axis=1)
    starts = np.concatenate([[0], np.flatnonzero(is_new) + 1, [len(order)]])
    for which in np.flatnonzero(np.diff(starts) > 1):
        # The sort is stable, so each group is in ascending order.
        yield order[starts[which] : starts[which + 1]]


# Pillow releases the GIL while it decodes, so threads are as fast as processes and need no copies.
IMAGES_AT_ONCE = 16
Progress = Callable[[int, int], None]


class Problem(NamedTuple):
    """A line of the report.

    Attributes:
        path: path of the image, or ``split/class``.
        problem: a key of :data:`covpool.data.check.REMEDIES`.
        detail: the problem in a sentence.
    """

    path: str
    problem: str
    detail: str


class Collection:
    """The images of all splits, numbered consecutively, with their digests."""

    def __init__(self, sets: Mapping[Split, ImageSet]) -> None:
        self.sets = list(sets.values())
        # Many threads can read files at once; other sets are read by one thread at a time.
        self.locks = [NO_LOCK if isinstance(s, ImageFiles) else threading.RLock() for s in self.sets]
        self.ends: NDArray[np.int64] = np.cumsum([len(images) for images in self.sets])
        total = int(self.ends[-1])
        self.content = np.zeros((total, DIGEST_BYTES), dtype=np.uint8)
        self.samples = np.zeros((total, DIGEST_BYTES), dtype=np.uint8)
        self.is_good = np.zeros(total, dtype=bool)

    def find(self, number: int) -> tuple[int, ImageSet, int]:
        """Return the number of an image's split, the split's images, and its index among them."""
        split = int(np.searchsorted(self.ends, number, side="right"))
        images = self.sets[split]
        return split, images, number - int(self.ends[split]) + len(images)

    def name(self, number: int) -> str:
        """Return the path of an image."""
        split, images, i = self.find(number)
        with self.locks[split]:
            return images.name(i)

    def look_at_all(self, workers: int, progress: Progress | None) -> Iterator[Problem]:
        """Check every image, yield the problems, and store the digests of readable images."""
        total = len(self.is_good)
        tasks = (
            range(start, min(start + IMAGES_AT_ONCE, total)) for start in range(0, total, IMAGES_AT_ONCE)
        )
        with ThreadPoolExecutor(workers) as pool:
            waiting: deque[tuple[range, Future[list[Look]]]] = deque()
            try:
                for task in tasks:
                    waiting.append((task, pool.submit(self._look, task)))
                    if len(waiting) > 2 * workers:
                        yield from self._keep(*waiting.popleft(), progress)
                while waiting:
                    yield from self._keep(*waiting.popleft(), progress)
            finally:
                # After Ctrl-C, wait only for running tasks.
                pool.shutdown(cancel_futures=True)

    def _look(self, numbers: range) -> list[Look]:
        return [look(images, i, self.locks[split]) for split, images, i in map(self.find, numbers)]

    def _keep(
        self, numbers: range, looks: Future[list[Look]], progress: Progress | None
    ) -> Iterator[Problem]:
        for number, look in zip(numbers, looks.result(), strict=True):
            if look.content:
                self.is_good[number] = True
                self.content[number] = np.frombuffer(look.content, dtype=np.uint8)
                self.samples[number] = np.frombuffer(look.samples, dtype=np.uint8)
            if look.problem:
                yield Problem(self.name(number), look.problem, look.detail)
        if progress is not None:
            progress(numbers.stop, len(self.is_good))

    def same(self) -> Iterator[Problem]:
        """Yield a problem for every image that equals an earlier one."""
        good = np.flatnonzero(self.is_good)

        def pixels_of(place: int) -> bytes:
            _, images, i = self.find(int(good[place]))
            return pixels(images, i)

        same = same_images(self.content[good], self.samples[good], pixels_of)
        for group in groups_of_equals(same):
            yield from self._copies([int(number) for number in good[group]])

    def _copies(self, numbers: list[int]) -> Iterator[Problem]:
        """Yield a problem for each of several equal images except the first."""
        first: dict[
            tuple[int, int], int
        ] = {}  # per split and label: a placeholder image can occur thousands of times
        for number in numbers:
            split, images, i = self.find(number)
            label = images.label(i)
            if first:
                yield self._copy(number, split, label, first)
            first.setdefault((split, label), number)

    def _copy(self, number: int, split: int, label: int, first: dict[tuple[int, int], int]) -> Problem:
        problem, original = "duplicate", next(iter(first.values()))
        for (its_split, its_label), another in first.items():
            if its_split != split:
                problem, original = "leak", another
                break
            if its_label != label and problem == "duplicate":
                problem, original = "two labels", another
        name, other = self.name(number), self.name(original)
        if name == other:  # of a table: two rows name a file
            _, images, i = self.find(original)
            of = f"another row names it, as {images.classes[images.label(i)]}"
            return Problem(name, "listed twice" if problem == "duplicate" else problem, of)
        equal = "bytes" if np.array_equal(self.content[number], self.content[original]) else "pixels"
        return Problem(name, problem, f"it has the {equal} of {other}")


# Stands for the digest of an unreadable image.
UNREADABLE = bytes(Digest().digest_size)


def content_number(data: bytes) -> int:
    """Return a number from 0 to 2**63 - 1 that identifies the bytes of an image."""
    return int.from_bytes(Digest(data).digest()[:8], "little") >> 1


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
    digest, each = Digest(repr(images.classes).encode("utf-8", "surrogateescape")), bytearray()
    for i in range(len(images)):
        label = images.label(i)
        digest.update(f"{images.name(i)}\0{label}\0".encode("utf-8", "surrogateescape"))
        try:
            image_digest = Digest(images.read(i)).digest()
            digest.update(image_digest)
        except (OSError, ValueError) as error:  # an unreadable image has no features either
            image_digest = UNREADABLE
            digest.update(type(error).__name__.encode())
        each += image_digest
        progress(i + 1, len(images))
    return Content(digest.hexdigest(), bytes(each))


def check_lasting(images: ImageSet, bad: Iterable[int], content: Content) -> None:
    """Raise if an unreadable image was readable when it was hashed.

    Features are identified by these hashes, so after one disk or network error the image would be missing
    from the stored features forever. Shards are not checked.

    Raises:
        ValueError: if the bytes of an image have changed, or the image is readable again.
    """
    for i in bad if content.images else ():
        before = content.images[i * len(UNREADABLE) : (i + 1) * len(UNREADABLE)]
        try:
            data = images.read(i)
            if Digest(data).digest() != before:
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
