"""The limits of remote files, retries, and which errors are about one file and which about the machine.

Every request has a limit of time and of bytes, a number of retries, and a largest wait between them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from covpool.errors import BadImageError, ShardError, UnreachableError, UsageError

T = TypeVar("T")

RETRIES = 3
# A table, an index or a list may take this many times the seconds of one image.
TABLE_TIMEOUTS = 10
# Bytes per second of the slowest server that a large file is downloaded from.
SLOWEST = 1 << 16
# The longest wait before a retry, whatever a server asks for.
MAX_WAIT_SECONDS = 60.0
# Any host may be private, and any local file may be named.
ANY = "*"
# The largest object that is read into memory.
MAX_BODY_BYTES = 1 << 28
# HTTP status codes of a file that does not exist.
MISSING = (404, 410)
# Errors of the machine or the network: the next image would fail too, and later none would.
PASSING = {
    getattr(errno, name)
    for name in ("EMFILE", "ENFILE", "ENOMEM", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH")
    if hasattr(errno, name)
}


@dataclass(frozen=True)
class Requests:
    """How long to wait for a URL, and how many may fail.

    Attributes:
        timeout: seconds to fetch a URL, with all retries, or to decode an image; then its row has an error.
        connect_timeout: seconds to connect to a server.
        read_timeout: seconds without data from a server.
        retries: retries of a failed request, with growing pauses.
        max_bad: failed URLs in sequence, per process that reads, before the job stops.
    """

    timeout: float = 60.0
    connect_timeout: float = 10.0
    read_timeout: float = 20.0
    retries: int = RETRIES
    max_bad: int = 100

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "read_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < float("inf"):
                raise UsageError(f"{name} must be a number of seconds above 0; got {seconds}")
        for name in ("retries", "max_bad"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0; got {getattr(self, name)}")

    @property
    def table_timeout(self) -> float:
        """Seconds to fetch a table, an index or a list."""
        return TABLE_TIMEOUTS * self.timeout


# An address keeps the values of the time when it was made, so worker processes have them too.
_REQUESTS: ContextVar[Requests] = ContextVar("requests", default=Requests())  # noqa: B039  # frozen
_TRUST_ROWS: ContextVar[bool] = ContextVar("trust_rows", default=False)


def current() -> Requests:
    """Return the limits of requests."""
    return _REQUESTS.get()


def rows_are_trusted() -> bool:
    """Return whether rows may name any file and any server."""
    return _TRUST_ROWS.get()


@contextlib.contextmanager
def limited(requests: Requests) -> Iterator[None]:
    """Open images with these limits inside ``with``."""
    token = _REQUESTS.set(requests)
    try:
        yield
    finally:
        _REQUESTS.reset(token)


@contextlib.contextmanager
def trust_rows(trusted: bool = True) -> Iterator[None]:
    """Open tables inside ``with`` whose rows may name any file and any server, as ``--trust-rows`` does."""
    token = _TRUST_ROWS.set(trusted)
    try:
        yield
    finally:
        _TRUST_ROWS.reset(token)


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
        except ImportError as error:
            raise ShardError(f"{url} needs a package: {error}") from error
        except (UnreachableError, BadImageError):
            raise
        except Exception as raised:  # each fsspec backend raises its own kinds
            failure: Exception = raised
            # Over HTTP, fsspec reports a missing file whenever the server does not tell its size.
            if isinstance(raised, FileNotFoundError) and url.startswith("http"):
                cause = raised.__cause__
                if isinstance(cause, Exception) and _status(cause) not in MISSING:
                    failure = cause
            if isinstance(failure, FileNotFoundError):
                raise ShardError(f"{url} does not exist") from failure
            if isinstance(failure.__cause__, UnreachableError):  # of the resolver of names
                raise failure.__cause__ from failure
            is_final = pause is None or type(failure).__name__ in FINAL
            wait = None if is_final else max(pause or 0, _wait_asked(failure))
            if wait is None or time.monotonic() + wait > until:
                raise ShardError(f"{url} cannot be {done}: {_reason(failure)}") from failure
            time.sleep(wait)
    raise AssertionError("unreachable")


def _status(error: Exception) -> int | None:
    """Return the HTTP status code of an error."""
    return getattr(error, "status", None)


def _wait_asked(error: Exception) -> float:
    """Return the seconds that a server asks to wait, up to a limit; 0 if it does not."""
    asked = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
    return min(float(asked), MAX_WAIT_SECONDS) if asked.isdecimal() else 0.0


# Errors of aiohttp, by name: other stores do without it. Those that a retry cannot mend.
REASONS = {
    "TooManyRedirects": "the server redirects without end",
    "ClientPayloadError": "the answer ends before its end",
}
FINAL = ("TooManyRedirects",)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no complete answer in time"
    if reason := REASONS.get(type(error).__name__):
        return reason
    status = _status(error)
    return f"the server answers {status}" if status else str(error) or type(error).__name__
