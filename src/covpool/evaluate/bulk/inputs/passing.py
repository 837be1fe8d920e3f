"""Errors that are no fault of an image: written down as its error, they would stay when they are over."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from covpool.data.shards.index import ShardError

# Of the machine or of the network: the next image would fail too, and none of them later.
PASSING = {
    getattr(errno, name)
    for name in ("EMFILE", "ENFILE", "ENOMEM", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH")
    if hasattr(errno, name)
}


def is_passing(error: OSError) -> bool:
    """Whether an error says nothing of the file."""
    return error.errno in PASSING


def was_taken_off(path: str | Path, error: OSError) -> bool:
    """Whether a file that was there is gone with all that lay beside it, as when a disk was taken off."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def cannot_go_on(what: object, error: OSError) -> ShardError:
    """What ends the job, which goes on from there when it is given again."""
    return ShardError(f"the input cannot be read any more: {what}: {error.strerror or error}")
