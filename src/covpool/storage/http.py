"""A client for HTTP that trusts no server: limits on time, bytes and redirects.

fsspec sends its requests through this client. A response is read up to a number of bytes, counted after
decompression. Neither a name nor a redirect may lead to a private address, unless the command line names the
server or trusts the rows.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from fsspec.asyn import sync
from yarl import URL

from covpool.errors import BadImageError, UnreachableError
from covpool.storage.remote import ANY, MAX_BODY_BYTES, Requests, current

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_private(address: str) -> bool:
    """Return whether an IP address is not one of the public internet.

    Example:
        >>> [is_private(one) for one in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "::ffff:10.0.0.1")]
        [True, True, True, True]
        >>> [is_private(one) for one in ("64:ff9b::7f00:1", "::7f00:1", "64:ff9b:1::7f00:1")]
        [True, True, True]
        >>> [is_private(one) for one in ("8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808")]
        [False, False, False]
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in NAT64:  # leads to the IPv4 address in its last 32 bits
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        else:
            ip = ip.ipv4_mapped or ip.sixtofour or ip
    return not ip.is_global or ip.is_multicast or ip.is_reserved


def check_url(url: str | URL, home: str) -> None:
    """Raise if a URL has a private address as its host. Names are checked when they are resolved.

    Args:
        url: the URL of a row or of a redirect.
        home: the host and port that may be private; ``"*"`` for all.
    """
    try:
        parsed = URL(url)
    except ValueError as error:
        raise BadImageError("unreadable", f"it is not a valid URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UnreachableError(f"{parsed.scheme or url} is not allowed here: use http or https")
    if home not in (ANY, host_of(parsed)):
        try:
            address = str(ipaddress.ip_address(parsed.host))
        except ValueError:  # a name
            return
        _check_public(parsed.host, address)


def host_of(url: str | URL) -> str:
    """Return the host and port of a URL."""
    parsed = URL(url)
    return f"{parsed.host}:{parsed.port}"


def _check_public(host: str, address: str) -> None:
    if is_private(address):
        raise UnreachableError(
            f"{host} is on a private network, which rows and redirects may not name: pass --trust-rows"
        )


class _Resolver(AbstractResolver):
    """Look names up, and refuse private addresses. The address that was checked is the one that is used."""

    def __init__(self, home: str) -> None:
        self.home, self.resolver = home, aiohttp.DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        hosts = await self.resolver.resolve(host, port, family)
        if self.home not in (ANY, f"{host}:{port}"):
            for entry in hosts:
                _check_public(host, entry["host"])
        return hosts

    async def close(self) -> None:
        await self.resolver.close()


class _Response(aiohttp.ClientResponse):
    """A response that is not read past a limit; a few kilobytes can decompress to gigabytes."""

    async def read(self) -> bytes:
        if self._body is None:
            body = bytearray()
            if (self.content_length or 0) > MAX_BODY_BYTES:
                raise self._too_large()
            async for part in self.content.iter_any():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise self._too_large()
            self._body = bytes(body)
        return self._body

    def _too_large(self) -> BadImageError:
        self.close()
        return BadImageError("too large", f"the server sends more than {MAX_BODY_BYTES:,} bytes")


def limits(requests: Requests, seconds: float) -> aiohttp.ClientTimeout:
    """Return the limits of a request that may take some seconds in all: a server could send forever."""
    return aiohttp.ClientTimeout(
        total=seconds, sock_connect=requests.connect_timeout, sock_read=requests.read_timeout
    )


def download(store: Any, url: str, path: Path, until: float, callback: Any) -> None:
    """Download a large file, which may take longer than other requests; give up at a time."""
    seconds = max(until - time.monotonic(), 0.1)
    fetch = functools.partial(store._get_file, timeout=limits(current(), seconds))
    sync(store.loop, fetch, url, str(path), callback=callback)


@functools.cache  # fsspec reuses a file system, and its connections, if the function is the same
def client(home: str, requests: Requests) -> Callable[..., Awaitable[aiohttp.ClientSession]]:
    """Return a function that makes a session.

    Args:
        home: the host and port that may be private; ``"*"`` for all.
        requests: the limits of requests.
    """

    async def check_redirect(session: object, context: SimpleNamespace, seen: Any) -> None:
        where = seen.response.headers.get("Location") or seen.response.headers.get("URI") or ""
        check_url(seen.response.url.join(URL(where)), home)

    async def make(**options: Any) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(check_redirect)
        ours: dict[str, Any] = {
            "connector": aiohttp.TCPConnector(resolver=_Resolver(home)),
            "cookie_jar": aiohttp.DummyCookieJar(),
            "headers": {"Accept-Encoding": "identity"},
            "response_class": _Response,
            "timeout": limits(requests, requests.table_timeout),
            "trace_configs": [trace],
        }
        return aiohttp.ClientSession(**(ours | options))

    return make
