"""List files of images, and read them, on disk or in object storage."""

from __future__ import annotations

import functools
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from covpool.data.decode import FORMAT_OF, NOT_READ
from covpool.data.image_set import BaseSet, Names
from covpool.errors import UsageError
from covpool.storage.address import Address
from covpool.storage.files import Digest
from covpool.storage.remote import cannot_go_on, was_taken_off
from covpool.terminal import counted

LOGGER = logging.getLogger("covpool")
ARCHIVES = (".parquet", ".tar")


def list_below(address: Address) -> list[str]:
    """Return the names of the images, tars and Parquet files in a folder and below."""
    is_image = ImageNames()
    names = list_files(address, lambda name: is_image(name) or name.lower().endswith(ARCHIVES))
    is_image.warn(address.url)
    return names


def check_alike(address: Address, names: Sequence[str], extension: str) -> None:
    """Raise if a folder has other images next to the files with an extension."""
    matching = [name for name in names if name.lower().endswith(extension)]
    if len(matching) < len(names):
        raise UsageError(
            f"{address.url} has files that end in {extension}, such as {matching[0]}, next to other images: "
            "name a folder with one kind"
        )


def subfolders(path: Path) -> list[str]:
    """Return the names of the visible folders in a folder."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if is_visible(entry.name) and _is_folder(entry))


def is_visible(name: str) -> bool:
    """Return whether a file or folder is neither hidden nor added by macOS."""
    return not name.startswith(".") and name != "__MACOSX"


def is_image(name: str) -> bool:
    """Return whether a file has the extension of an image."""
    return os.path.splitext(name)[1].lower() in FORMAT_OF


class ImageNames:
    """Tells names of images from others, and counts the pictures among the others.

    Attributes:
        not_read: the number of pictures that are not read, by extension.
    """

    def __init__(self) -> None:
        self.not_read: Counter[str] = Counter()

    def __call__(self, name: str) -> bool:
        """Return whether a file has the extension of an image that is read."""
        extension = os.path.splitext(name)[1].lower()
        if extension in NOT_READ:
            self.not_read[extension] += 1
        return extension in FORMAT_OF

    def warn(self, path: object) -> None:
        """Log the pictures that are not read, with advice."""
        if self.not_read:
            kinds = self.not_read.most_common()
            listed = "; ".join(f"{count:,} {extension}, {NOT_READ[extension]}" for extension, count in kinds)
            total = counted(self.not_read.total(), "picture")
            _warn_once(f"{path}: {total} left out, in formats that are not read: {listed}")


@functools.lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    """Log a warning; a command that opens the same images several times logs it once."""
    LOGGER.warning(message)


def files_under(
    root: Path, accepts: Callable[[str], bool], folder: str = "", above: tuple[tuple[int, int], ...] = ()
) -> Iterator[str]:
    """Yield the files in a folder and below, in order, as paths relative to ``root``.

    Args:
        root: the folder that paths start from.
        accepts: returns whether to yield a file of this name.
        folder: the folder to list, relative to ``root``.
        above: device and inode of the folders on the way to it.
    """
    path = os.path.join(root, folder)
    status = os.stat(path)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise UsageError(f"{path} is a link back to a folder above it: remove it")
    files, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if not is_visible(entry.name):
                continue
            # The kind comes with the name, so only links are queried. Reading reports a broken link.
            if _is_folder(entry):
                folders.append(entry.name)
            elif accepts(entry.name) and (entry.is_symlink() or entry.is_file()):
                files.append(entry.name)
    start = f"{folder}/" if folder else ""
    for name in sorted(files, key=composed):
        yield f"{start}{name}"
    for name in sorted(folders, key=composed):
        yield from files_under(root, accepts, f"{start}{name}", (*above, identity))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def list_files(folder: Address, accepts: Callable[[str], bool]) -> list[str]:
    """Return the names of the accepted files in a folder and below, in order."""
    if folder.is_local:
        return list(files_under(Path(folder.path), accepts))
    names = (path[len(folder.path) :].lstrip("/") for path in folder.files_below())
    return sorted(name for name in names if all(map(is_visible, name.split("/"))) and accepts(name))


def composed(name: str) -> str:
    """Return a name with é as one letter; macOS may store an e and an accent."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


class FileImages(BaseSet):
    """Unlabeled images in files, on disk or in object storage.

    Args:
        root: the folder that names start from.
        names: of the files. Sizes and dates of local files are read at once.
    """

    classes: tuple[str, ...] = ()
    labels = None

    def __init__(self, root: Address, names: Iterable[str]) -> None:
        self.root, self.names = root, Names(names)
        self._stamp, self._absent = self._look()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        """Return the path from the folder."""
        return self.names[i]

    def read(self, i: int) -> bytes:
        """Return the bytes of a file."""
        try:
            return self.root.read_listed(self.names[i])
        except OSError as error:
            was_there = self.root.is_local and i not in self._absent
            path = os.path.join(self.root.path, self.names[i])
            if was_there and was_taken_off(path, error):
                raise cannot_go_on(path, error) from error
            raise

    def stamp(self) -> str:
        """Return a hash of names, sizes and dates; in object storage, of names and the folder's URL."""
        return self._stamp

    def _look(self) -> tuple[str, frozenset[int]]:
        """Return the stamp, and the numbers of the local files that do not exist now."""
        digest, absent = Digest(bytes(self.names.joined) + self.names.ends.tobytes()), []
        if not self.root.is_local:
            digest.update(self.root.url.encode())
            return digest.hexdigest(), frozenset()
        for i, name in enumerate(self.names):
            try:
                status = os.stat(os.path.join(self.root.path, name))
                digest.update(f"{status.st_size},{status.st_mtime_ns};".encode())
            except (OSError, ValueError):  # also for a URL in a list
                digest.update(b"-")
                absent.append(i)
        return digest.hexdigest(), frozenset(absent)
