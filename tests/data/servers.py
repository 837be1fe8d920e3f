"""A web server on localhost that misbehaves."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from pathlib import Path
from urllib.parse import unquote

ZEROS = bytes(1 << 16)


class Server(http.server.ThreadingHTTPServer):
    """Serve some files, and send bad answers for other paths.

    Attributes:
        files: the content of each path.
        asked: the number of requests for each path.
        sent: the number of bytes sent in endless answers.
        is_down: whether all answers are 503.
        absent: the status code for missing files.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.files: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.sent = 0
        self.is_down = False
        self.absent = 404
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *arguments: object) -> None:
        """Ignore clients that close the connection."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, _, rest = self.path.partition("?")
        self.server.asked[path] += 1
        if self.server.is_down:
            self.answer(503)
        elif path in self.server.files:
            self.answer(200, self.server.files[path])
        elif path.startswith("/status/"):
            self.answer(int(path.split("/")[2]))
        elif path.startswith("/flaky/"):  # the second request succeeds
            is_second = self.server.asked[path] > 1
            self.answer(200 if is_second else 429, self.server.files["/good.jpg"] if is_second else b"")
        elif path == "/redirect":
            self.answer(302, location=unquote(rest))
        elif path == "/loop":
            self.answer(302, location="/loop")
        elif path == "/short":
            self.answer(200, b"half of it", length=1000)
        elif path == "/reset":
            self.connection.close()
        elif path == "/hang":
            time.sleep(600)
        elif path == "/drip":
            self.head(200, 100_000)
            while True:
                self.wfile.write(b"0")
                time.sleep(0.1)
        elif path.startswith("/drip-headers"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                self.wfile.write(b"X: 0\r\n")
                time.sleep(0.1)
        elif path == "/gzip":
            self.answer(200, gzip.compress(bytes(8 << 20), 1), encoding="gzip")
        elif path == "/endless":
            self.head(200, None)
            with contextlib.suppress(OSError):
                while True:
                    self.server.sent += self.wfile.write(ZEROS)
        else:
            self.answer(self.server.absent)

    do_HEAD = do_GET  # noqa: N815

    def head(self, status: int, length: int | None, location: str = "", encoding: str = "") -> None:
        self.send_response(status)
        fields = {"Content-Length": length, "Location": location, "Content-Encoding": encoding}
        for name, value in fields.items():
            if value not in (None, ""):
                self.send_header(name, str(value))
        self.end_headers()

    def answer(
        self,
        status: int,
        body: bytes = b"",
        location: str = "",
        length: int | None = None,
        encoding: str = "",
    ) -> None:
        self.head(status, len(body) if length is None else length, location, encoding)
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Liar(Server):
    """Serve a folder, and slow down or lie in answers that a seed chooses.

    Attributes:
        folder: the folder.
        chance: chooses the answers.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(Lying)
        self.folder, self.chance = folder, random.Random(0)

    def serve(self, folder: Path, seed: str) -> None:
        """Serve another folder, and end the answers for the last one. Half of the answers are good."""
        self.folder, self.chance = folder, random.Random(seed)


class Lying(Handler):
    server: Liar

    def do_GET(self) -> None:
        self.folder, chance = self.server.folder, self.server.chance
        lies = (self.drip, self.drip_headers, self.wait, self.short, self.claim, self.status, self.loop)
        lies = (*lies, self.endless, self.packed, self.listing, self.connection.close)
        try:
            data = (self.folder.parent / self.path.strip("/")).read_bytes()
        except OSError:
            data = b""
        with contextlib.suppress(OSError):
            if chance.random() < 0.5:
                self.good(data)
            else:
                self.body = data
                chance.choice(lies)()

    do_HEAD = do_GET  # noqa: N815

    def good(self, data: bytes) -> None:
        first, last = 0, len(data) - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2]), last)
        self.send_response(404 if not data else 206 if asked else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[first : last + 1])

    def slowly(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            if self.folder != self.server.folder:
                break
            self.wfile.write(part)
            time.sleep(0.05)

    def drip(self) -> None:
        self.head(200, 100_000)
        self.slowly(repeat(b"0"))

    def drip_headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.slowly(f"X-{i}: 0\r\n".encode() for i in count())

    def wait(self) -> None:
        self.slowly(repeat(b""))

    def short(self) -> None:
        self.answer(200, self.body[: len(self.body) // 2], length=len(self.body) + 1)

    def claim(self) -> None:
        """Claim a huge size; what follows may be endless, too."""
        size = self.server.chance.choice((1 << 31, 1 << 60, 10**400))
        self.send_response(self.server.chance.choice((200, 206)))
        self.send_header("Content-Range", f"bytes 0-{size - 1}/{size}")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.body)

    def status(self) -> None:
        self.send_response(self.server.chance.choice((301, 400, 403, 404, 416, 429, 500, 503)))
        self.send_header("Retry-After", self.server.chance.choice(("1", "1000000", "9" * 400, "soon")))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def loop(self) -> None:
        places = (self.path, "/..", "file:///etc/passwd", "http://10.0.0.1/", "http://[::1]/", "//", "::")
        self.answer(302, location=self.server.chance.choice(places))

    def endless(self) -> None:
        self.head(200, None)
        while self.folder == self.server.folder:
            self.wfile.write(ZEROS)

    def packed(self) -> None:
        self.answer(200, gzip.compress(bytes(8 << 20), 1), encoding="gzip")

    def listing(self) -> None:
        """List folders in folders without end."""
        names = (f"{i}/" for i in range(3))
        self.answer(200, "".join(f'<a href="{name}">{name}</a>' for name in names).encode())
