"""Retry requests to object storage, and tell errors of one file from those of the machine."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from covpool.errors import BadImageError, ShardError, UnreachableError

T = TypeVar("T")

RETRIES = 3
# Errors of the machine or the network: the next image would fail too, and later none would.
PASSING = {
    getattr(errno, name)
    for name in ("EMFILE", "ENFILE", "ENOMEM", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH")
    if hasattr(errno, name)
}


def pauses_before(retries: int) -> tuple[float, ...]:
    """Return the seconds to wait before each retry: requests to object storage fail occasionally.

    Example:
        >>> pauses_before(4)
        (0.5, 2.0, 8.0, 8.0)
    """
    return tuple(min(0.5 * 4.0**number, 8.0) for number in range(retries))


def is_passing(error: OSError) -> bool:
    """Return whether an error is not about the file."""
    return error.errno in PASSING


def was_taken_off(path: str | Path, error: OSError) -> bool:
    """Return whether a file is gone together with its whole folder, for example after an unmount."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def cannot_go_on(what: object, error: OSError) -> ShardError:
    """Return the error that stops a job; rerun the command to resume."""
    return ShardError(f"the input cannot be read any more: {what}: {error.strerror or error}")


def patiently(
    url: str,
    attempt: Callable[[], T],
    done: str = "read",
    pauses: Sequence[float] | None = None,
    until: float = float("inf"),
) -> T:
    """Call a function on remote storage, and retry it a few times if it fails.

    Args:
        url: the URL, for the error message.
        attempt: the function.
        done: past participle of the action, for the error message.
        pauses: seconds before each retry.
        until: when to give up, by ``time.monotonic``.

    Raises:
        ShardError: if every attempt failed, with the last error.
        UnreachableError: if the URL is not allowed.
        BadImageError: if its content is too large.
    """
    for pause in (*(pauses_before(RETRIES) if pauses is None else pauses), None):
        try:
            return attempt()
        except FileNotFoundError as error:
            raise ShardError(f"{url} does not exist") from error
        except ImportError as error:
            raise ShardError(f"{url} needs a package: {error}") from error
        except (UnreachableError, BadImageError):
            raise
        except Exception as error:  # each fsspec backend raises its own kinds
            if isinstance(error.__cause__, UnreachableError):  # of the resolver of names
                raise error.__cause__ from error
            wait = None if pause is None else max(pause, _wait_asked(error))
            if wait is None or time.monotonic() + wait > until:
                raise ShardError(f"{url} cannot be {done}: {_reason(error)}") from error
            time.sleep(wait)
    raise AssertionError("unreachable")


def _wait_asked(error: Exception) -> float:
    """Return the seconds that a server asks to wait; 0 if it does not."""
    asked = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
    return float(asked) if asked.isascii() and asked.isdecimal() else 0.0


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no complete answer in time"
    status = getattr(error, "status", None)
    return f"the server answers {status}" if status else str(error) or type(error).__name__
