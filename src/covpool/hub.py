"""The Hugging Face Hub: models as ``hf-hub:user/name@revision``, data as ``hf://datasets/user/name``.

All requests are made by ``huggingface_hub``, with its cache on disk and its token (``hf auth login``, or the
variable ``HF_TOKEN``). covpool has no option for a token, and no message, log or file of covpool has one: the
errors here quote no text of a server.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from covpool import __version__
from covpool.errors import CovpoolError, HubError, UsageError

# Begins the address of a model, and that of a data set.
HUB, HUB_DATA = "hf-hub:", "hf://datasets/"
COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
# The branch with Parquet files that the Hub makes of data sets in other formats.
CONVERTED = "refs/convert/parquet"
# Seconds to wait for a connection. The Hub's own downloader tries for a minute, and prints every attempt.
HUB_SECONDS = 3.0


@dataclass(frozen=True)
class HubAddress:
    """A repository on the Hub.

    Attributes:
        repository: ``user/name``.
        revision: a branch, a tag or a commit; empty for the main branch.
        kind: a model or a data set.
    """

    repository: str
    revision: str = ""
    kind: Literal["model", "dataset"] = "model"

    @classmethod
    def of(cls, text: str) -> HubAddress:
        """Read ``hf-hub:user/name@revision``; the prefix may be missing.

        Raises:
            UsageError: if this is not an address.

        Example:
            >>> HubAddress.of("hf-hub:ann/birds@v1")
            HubAddress(repository='ann/birds', revision='v1', kind='model')
        """
        repository, at, revision = text.removeprefix(HUB).partition("@")
        if not re.fullmatch(NAME, repository) or not re.fullmatch(r"[\w./-]+" if at else "", revision):
            raise UsageError(f"{text!r} is not an address on the Hub: write hf-hub:user/name@revision")
        return cls(repository, revision)

    def __str__(self) -> str:
        start = HUB if self.kind == "model" else HUB_DATA
        return f"{start}{self.repository}" + (f"@{self.revision}" if self.revision else "")

    @property
    def page(self) -> str:
        """The URL for a browser."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repository}"

    def file(self, name: str, *, again: bool = False) -> Path:
        """Return a file in the cache, after downloading it if it is not there.

        If the Hub does not answer, the newest copy in the cache is used.

        Args:
            name: the path in the repository.
            again: download it even if the cache has it.

        Raises:
            HubError: the Hub does not give the file, and the cache has none.
        """
        from huggingface_hub import hf_hub_download

        return self._get(hf_hub_download, name, {"filename": name}, {"force_download": again})

    def files(self, pattern: str) -> Path:
        """Return the folder in the cache with all files whose paths match, after downloading them."""
        from huggingface_hub import snapshot_download

        return self._get(snapshot_download, pattern, {"allow_patterns": [pattern]}, {})

    def _get(
        self, function: Callable[..., str], name: str, what: dict[str, Any], online: dict[str, Any]
    ) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.errors import LocalEntryNotFoundError

        what |= {
            "repo_id": self.repository,
            "repo_type": self.kind,
            "revision": self.revision or None,
            "library_name": "covpool",
            "library_version": __version__,
        }
        if COMMIT.fullmatch(self.revision) and not online.get("force_download"):
            with contextlib.suppress(LocalEntryNotFoundError):  # a commit never changes
                return Path(function(**what, local_files_only=True))
        if why := silence():
            try:
                return Path(function(**what, local_files_only=True))
            except LocalEntryNotFoundError:
                raise HubError(
                    f"{self}: {why}, and {name} is not in the cache {constants.HF_HUB_CACHE}"
                ) from None
        with explained(self, name):
            return Path(function(**what, **online))


def download_data(text: str) -> Path:
    """Download the Parquet files of a data set, and return their folder in the cache, or the file.

    Args:
        text: ``hf://datasets/user/name``, with ``@revision``, a folder, or a file of the repository. Without
            a revision, the Hub's own conversion to Parquet is used if the main branch has no such files.

    Raises:
        HubError: the Hub does not give the files.
        UsageError: there are none.
    """
    match = re.fullmatch(f"{HUB_DATA}({NAME})(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", text)
    if match is None:
        raise UsageError(f"{text!r} is not a data set on the Hub: write hf://datasets/user/name@revision")
    inside = (match[3] or "").strip("/")
    pattern = inside if inside.endswith(".parquet") else f"{inside}/*.parquet".lstrip("/")
    refused: HubError | None = None
    for revision in [unquote(match[2])] if match[2] else ["", CONVERTED]:
        address = HubAddress(match[1], revision, "dataset")
        try:
            folder = address.files(pattern) / inside
        except HubError as error:
            if revision != CONVERTED or match[2]:
                refused = error
            continue
        if folder.is_file() or any(folder.rglob("*.parquet")):
            return folder
    if refused is not None:
        raise refused
    raise UsageError(f"{text} has no Parquet files: see {address.page}/tree/main for its folders")


def silence() -> str:
    """Return why the Hub is not asked; nothing if it accepts connections."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return "" if connects(constants.ENDPOINT) else f"cannot connect to {constants.ENDPOINT}"


def connects(url: str) -> bool:
    """Return whether the server of the URL, or the proxy to it, accepts connections."""
    server = urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(server.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(server.hostname or ""):
        server = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = server.port or (443 if server.scheme == "https" else 80)
    connected = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((server.hostname, port), HUB_SECONDS):
            connected.set()

    # In a thread: a timeout of a socket does not limit the lookup of the name.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return connected.is_set()


@contextlib.contextmanager
def explained(address: HubAddress, name: str = "") -> Iterator[None]:
    """Turn the errors of requests into a HubError, which quotes nothing that a server sent."""
    try:
        yield
    except CovpoolError:
        raise
    except Exception as error:
        causes = [error]
        while cause := causes[-1].__cause__:
            if not isinstance(cause, Exception):
                break
            causes.append(cause)
        if any(isinstance(cause, OSError) and cause.errno for cause in causes) and not any(
            map(_status, causes)
        ):
            raise  # of the disk
        raise HubError(f"{address}: {_sentence(address, name, causes)}") from None


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _sentence(address: HubAddress, name: str, causes: list[Exception]) -> str:
    """Return what is wrong and what to do, for an error and its causes."""
    from huggingface_hub import constants, errors

    def has(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    kinds = {base.__name__ for cause in causes for base in type(cause).__mro__}
    status = next(filter(None, map(_status, causes)), None)
    page = address.page
    if has(errors.GatedRepoError):
        return f"its authors grant access on request: ask for it at {page}, then log in with hf auth login"
    if has(errors.RevisionNotFoundError):
        return f"there is no revision {address.revision or 'main'!r}; {page}/commits/main lists them"
    if has(errors.EntryNotFoundError) and status == 404:
        timm = (
            ", or use it as a backbone with --model, if it is one of timm" if name == "covpool.json" else ""
        )
        return f"the repository has no {name}: pass a repository of covpool push{timm}"
    if has(errors.RepositoryNotFoundError) or status == 401:
        return "there is no such repository, or it is private: check the name, or log in with hf auth login"
    if status == 403:
        return "your token does not allow this: make one with the right permissions, and run hf auth login"
    if status == 429:
        return "the Hub refuses more requests for now (status 429): try again later, or log in"
    if status is not None:
        return f"the Hub answers with status {status}: try again later"
    if kinds & {"TooManyRedirects"}:
        return f"{constants.ENDPOINT} redirects without end: check HF_ENDPOINT and your proxy"
    if any("Consistency check failed" in str(cause) for cause in causes):
        return f"{name} arrived with a wrong size: try again"
    if kinds & {"ConnectError", "NetworkError", "ProtocolError", "TimeoutException", "ConnectionError"}:
        return f"the connection to {constants.ENDPOINT} broke or timed out: try again"
    return (
        f"{constants.ENDPOINT} does not answer as the Hub does ({type(causes[-1]).__name__}): check "
        "HF_ENDPOINT, your proxy, and whether a login page is in between"
    )
