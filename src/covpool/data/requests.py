"""The limits of requests to servers and object storage, and how far rows of a table are trusted.

The module imports nothing slow, since its options are those of commands.
"""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from covpool.errors import UsageError


@dataclass(frozen=True)
class Requests:
    """How long to wait for a URL, and how many may fail.

    Attributes:
        timeout: seconds for one URL, with all its retries; then its row has an error.
        connect_timeout: seconds to connect to a server.
        read_timeout: seconds without data from a server.
        retries: retries of a failed request, with growing pauses.
        max_bad: failed URLs in sequence, per process that reads, before the job stops.
    """

    timeout: float = 60.0
    connect_timeout: float = 10.0
    read_timeout: float = 20.0
    retries: int = 3
    max_bad: int = 100

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "read_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < float("inf"):
                raise UsageError(f"{name} must be a number of seconds above 0; got {seconds}")
        for name in ("retries", "max_bad"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0; got {getattr(self, name)}")

    def pauses(self) -> tuple[float, ...]:
        """Return the seconds before each retry.

        Example:
            >>> Requests(retries=4).pauses()
            (0.5, 2.0, 8.0, 8.0)
        """
        return tuple(min(0.5 * 4.0**number, 8.0) for number in range(self.retries))


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
