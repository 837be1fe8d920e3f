"""One process at a time in a folder, by a lock that dies with the process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

LOCK = ".covpool-lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a folder, which is made if it is not there.

    Raises:
        ValueError: in a sentence, if another one holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "wb") as file:
        _lock(file.fileno(), folder)
        yield


def _lock(descriptor: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        # By fcntl, not flock: a worker that outlives a killed process must not keep its lock.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise ValueError(f"another process is writing into {folder}: let it finish") from error
    except OSError:  # a file system without locks
        return
