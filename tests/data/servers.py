"""A web server on localhost that misbehaves."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
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

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
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
