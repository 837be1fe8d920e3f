"""The files and URLs that a table row may name, and limits on the time and size of an answer."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from covpool.data.image_set import ImageSet
from covpool.data.sources import open_images, open_splits, open_unlabeled
from covpool.data.sources.parquet_file import read_parquet
from covpool.errors import BadImageError, ShardError, UnreachableError, UsageError
from covpool.storage import address as address_module
from covpool.storage.address import Address
from covpool.storage.cache import FileCache
from covpool.storage.remote import Requests, limited, patiently, trust_rows
from tests.data.servers import Server, serving

pytest.importorskip("aiohttp", reason="fsspec reads http by it")
QUICK = Requests(timeout=0.8, connect_timeout=0.3, read_timeout=0.3, retries=1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(address_module, "_failed", 0)
    with serving() as made:
        made.files["/good.jpg"] = b"good"
        yield made


def rows(folder: Path, kind: str, *names: str) -> ImageSet:
    """Return the images listed in a CSV or Parquet file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"list.{kind}"
    if kind == "csv":
        path.write_text("\n".join(["path", *names]))
    else:
        struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        values = [{"bytes": None, "path": name} for name in names]
        pq.write_table(pa.table({"image": pa.array(values, struct)}), path)
    return open_unlabeled(path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_row_runs_no_code_and_sends_no_request(tmp_path: Path, server: Server, kind: str) -> None:
    """A template of fsspec's references could run code."""
    code = "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "ran") + "') }}"
    evil = {"version": 1, "templates": {"u": code}, "refs": {"x": ["{{u}}"]}}
    server.files["/evil.json"] = json.dumps(evil).encode()
    names = (
        f"reference://x::{server.url}/evil.json",
        f"REFERENCE://x::{server.url}/evil.json",
        f"simplecache::{server.url}/good.jpg",
        f"zip://a.jpg::{server.url}/good.jpg",
        "memory://x",
        "sftp://127.0.0.1/x",
        "data://x",
    )
    with trust_rows():  # trusted rows may not do this either
        images = rows(tmp_path, kind, *names)
    for i in range(len(names)):
        with pytest.raises(UnreachableError, match=r"a row may not name a (chain|URL)"):
            images.read(i)
    assert not server.asked
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_paths_stay_in_the_folder_of_the_table(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.jpg").write_bytes(b"mine")
    inside = ("mine.jpg", "a/../mine.jpg", f"{tmp_path}/set/mine.jpg", f"file://{tmp_path}/set/mine.jpg")
    outside = (
        "../secret.jpg",
        "a/../../secret.jpg",
        f"{tmp_path}/secret.jpg",
        f"file://{tmp_path}/secret.jpg",
    )
    images = rows(tmp_path / "set", kind, *inside, *outside)
    assert [images.read(i) for i in range(4)] == [b"mine"] * 4
    for i in range(4, 8):
        with pytest.raises(UnreachableError, match=r"outside .*/set, .* pass --trust-rows$"):
            images.read(i)
    with trust_rows():
        images = rows(tmp_path / "set", kind, *outside)
    assert [images.read(i) for i in range(4)] == [b"secret"] * 4


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_module, "MAX_FILE_BYTES", 1000)
    (tmp_path / "large.jpg").write_bytes(bytes(1001))
    with pytest.raises(BadImageError, match="the file has more than 1,000 bytes"):
        rows(tmp_path, "csv", "large.jpg").read(0)


def test_labeled_tables_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    for name in ("../secret.jpg", f"{tmp_path}/secret.jpg"):
        (tmp_path / "set" / "list.csv").write_text(f"path,label\n{name},a\n")
        with pytest.raises(UsageError, match=r"lists .*secret\.jpg: it is outside .*pass --trust-rows$"):
            open_splits(tmp_path / "set" / "list.csv")
        with trust_rows():
            assert open_images(tmp_path / "set" / "list.csv").read(0) == b"secret"


def test_a_table_on_a_server_names_no_local_file(tmp_path: Path, server: Server) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    lines = ["path", f"file://{tmp_path}/secret.jpg", f"{tmp_path}/secret.jpg", "../secret.jpg", "good.jpg"]
    server.files["/list.csv"] = "\n".join(lines).encode()
    images = open_unlabeled(f"{server.url}/list.csv")
    for i in range(3):
        with pytest.raises(OSError, match=r"may not|does not exist"):
            images.read(i)
    assert images.read(3) == b"good"  # from the same server, which the command line names


def test_rows_do_not_reach_private_networks(tmp_path: Path, server: Server) -> None:
    port = server.server_port
    hosts = ("127.0.0.1", "localhost", "0.0.0.0", "127.1", "2130706433")
    names = [f"http://{host}:{port}/good.jpg" for host in hosts]
    with limited(QUICK):
        images = rows(tmp_path, "csv", *names)
    for i in range(len(names)):
        with pytest.raises(UnreachableError, match=r"on a private network|not a canonical"):
            images.read(i)
    assert not server.asked
    with trust_rows():
        images = rows(tmp_path, "csv", *names[:2])
    assert [images.read(0), images.read(1)] == [b"good", b"good"]


def test_redirects_do_not_reach_private_networks(tmp_path: Path, server: Server) -> None:
    """The command line names the first server, which redirects to another one."""
    with serving() as other:
        other.files["/good.jpg"] = b"other"
        targets = [f"http://{host}:{other.server_port}/good.jpg" for host in ("127.0.0.1", "localhost")]
        targets += ["file:///etc/hostname", "ftp://example.org/x", "/good.jpg"]
        lines = ["path", *(f"redirect?{target}" for target in targets)]
        server.files["/list.csv"] = "\n".join(lines).encode()
        with limited(QUICK):
            images = open_unlabeled(f"{server.url}/list.csv")
        for i in range(4):
            with pytest.raises(UnreachableError, match=r"on a private network|(file|ftp) is not allowed"):
                images.read(i)
        assert images.read(4) == b"good"
        assert not other.asked
        with trust_rows():
            assert open_unlabeled(f"{server.url}/list.csv").read(0) == b"other"


def test_redirects_without_end_are_asked_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.storage.remote.time.sleep", lambda seconds: None)
    with pytest.raises(ShardError, match="the server redirects without end"):
        Address.of(f"{server.url}/loop").read()
    assert server.asked["/loop"] <= 11  # the client follows ten
    with pytest.raises(ShardError, match="the answer ends before its end"):
        Address.of(f"{server.url}/short").read()


def test_bodies_have_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit also applies after decompression."""
    monkeypatch.setattr("covpool.storage.http.MAX_BODY_BYTES", 1 << 20)
    folder = Address.of(f"{server.url}/list.csv").parent
    for name in ("endless", "gzip"):
        with pytest.raises(BadImageError, match=r"sends more than 1,048,576 bytes"):
            folder.read_listed(name)
        assert server.asked[f"/{name}"] == 1
    assert server.sent < 64 << 20
    monkeypatch.setattr("covpool.storage.http.MAX_BODY_BYTES", 999)
    with pytest.raises(BadImageError, match="sends more than 999 bytes"):
        folder.read_listed("short")  # it states 1000 bytes


def test_objects_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int | None] = []

    def cat(self: object, path: str, start: int | None = None, end: int | None = None) -> bytes:
        ends.append(end)
        return bytes(end or 2000)

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", cat)
    monkeypatch.setattr(address_module, "MAX_BODY_BYTES", 1000)
    with pytest.raises(BadImageError, match="the store sends more than 1,000 bytes"):
        Address.of("memory://set").read_listed("large.jpg")
    assert ends == [1001]


def test_a_shard_is_not_downloaded_beyond_its_size(server: Server, tmp_path: Path) -> None:
    with limited(QUICK), pytest.raises(ShardError, match="more than the 1,000 bytes that are expected"):
        FileCache(tmp_path, 1 << 20).opened(f"{server.url}/endless", "1", 1000)


BAD = {
    "status/500": "the server answers 500",
    "status/429": "the server answers 429",
    "status/403": "the server answers 403",
    "short": "cannot be read",
    "reset": "cannot be read",
    "hang": "cannot be read",
    "drip": "no complete answer in time",
}


def test_a_bad_url_is_an_error_of_its_row_in_bounded_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.storage.address.pauses_before", lambda retries: (0.01,) * retries)
    with limited(QUICK):
        folder = Address.of(f"{server.url}/list.csv").parent
    for name, sentence in BAD.items():
        started = time.monotonic()
        with pytest.raises(UnreachableError, match=sentence):
            folder.read_listed(name)
        assert time.monotonic() - started < QUICK.timeout + 1
        assert folder.read_listed("good.jpg") == b"good"
    assert server.asked["/status/500"] == 1 + QUICK.retries
    assert server.asked["/status/403"] == 1
    with pytest.raises(FileNotFoundError):
        folder.read_listed("absent.jpg")


def test_a_server_that_sends_no_data_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.storage.address.pauses_before", lambda retries: (0.01,) * retries)
    with limited(Requests(timeout=10, read_timeout=0.2, retries=1)):
        folder = Address.of(f"{server.url}/list.csv").parent
    with pytest.raises(UnreachableError, match="cannot be read"):
        folder.read_listed("hang")
    assert server.asked["/hang"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse connections that Linux ignores")
def test_a_server_that_accepts_no_connection_is_left() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):  # fill its queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        with limited(Requests(timeout=10, connect_timeout=0.2, retries=0)):
            folder = Address.of(f"http://127.0.0.1:{listening.getsockname()[1]}/list.csv").parent
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="cannot be read"):
            folder.read_listed("a.jpg")
        assert time.monotonic() - started < 5


def test_an_unknown_host_is_an_error_of_its_row(tmp_path: Path) -> None:
    with limited(QUICK):
        images = rows(tmp_path, "csv", "http://no-such-host.invalid/a.jpg")
    with pytest.raises(UnreachableError, match=r"no-such-host\.invalid/a\.jpg cannot be read"):
        images.read(0)


def test_a_busy_server_is_asked_again(server: Server) -> None:
    with limited(Requests(retries=1)):
        folder = Address.of(f"{server.url}/list.csv").parent
    started = time.monotonic()
    assert folder.read_listed("flaky/a") == b"good"
    assert server.asked["/flaky/a"] == 2
    assert time.monotonic() - started > 0.5


def test_a_server_that_is_down_stops_the_job(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.storage.address.pauses_before", lambda retries: (0.01,) * retries)
    with limited(Requests(retries=1, max_bad=5)):
        folder = Address.of(f"{server.url}/list.csv").parent
    server.is_down = True
    for _ in range(5):
        with pytest.raises(UnreachableError):
            folder.read_listed("good.jpg")
    with pytest.raises(ShardError, match=r"^6 URLs in sequence failed.* rerun the command later"):
        folder.read_listed("good.jpg")
    assert server.asked["/good.jpg"] == 2 * 3 + 3  # after three URLs there are no retries
    server.is_down = False
    assert folder.read_listed("good.jpg") == b"good"
    server.is_down = True
    with pytest.raises(UnreachableError):
        folder.read_listed("good.jpg")


def test_options() -> None:
    for options in ({"timeout": 0.0}, {"read_timeout": float("nan")}, {"retries": -1}, {"max_bad": -1}):
        with pytest.raises(UsageError, match=next(iter(options))):
            Requests(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["1000000", "9" * 400, "-1", "soon", "١٢", ""])
def test_a_server_cannot_ask_for_an_endless_wait(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("covpool.storage.remote.time.sleep", waits.append)

    class BusyError(Exception):
        headers: ClassVar[dict[str, str]] = {"Retry-After": asked}

    def attempt() -> None:
        raise BusyError

    with pytest.raises(ShardError, match="cannot be read"):
        patiently("https://example.org/a", attempt)
    assert len(waits) == 3
    assert max(waits) <= 60


@pytest.mark.parametrize(
    "name",
    ["%2e%2e/secret.jpg", "a/%2E%2e/%2e./x.jpg", "%252e%252e/x.jpg", "..%2fx.jpg", f"%{'25' * 5}2e/x.jpg"],
)
def test_an_encoded_path_does_not_leave_the_folder_of_a_table(server: Server, name: str) -> None:
    server.files["/set/list.csv"] = f"path\n{name}\n".encode()
    images = open_unlabeled(f"{server.url}/set/list.csv")
    before = server.asked.total()
    with pytest.raises(UnreachableError, match=r"may not (lead out of the folder|encode a path so often)"):
        images.read(0)
    assert server.asked.total() == before


def test_an_ipv6_address_is_no_chain() -> None:
    folder = Address.of("/tmp")
    for host in ("[2001:4860:4860::8888]", "[64:ff9b::808:808]", "[::ffff:8.8.8.8]", "[2002:808:808::1]"):
        assert folder.listed(f"http://{host}/bird.jpg").path == f"http://{host}/bird.jpg"
    hosts = ("[::1]", "[64:ff9b::7f00:1]:8000", "[::ffff:10.0.0.1]", "[2002:a00:1::1]", "[::a00:1]")
    for host in (*hosts, "[ff0e::1]", "224.0.0.1", "240.0.0.1"):
        with pytest.raises(UnreachableError, match="is on a private network"):
            folder.listed(f"https://{host}/x")
    for chain in ("http://[2001:4860:4860::8888]/a::b", "zip://a::http://[2001:4860:4860::8888]/b"):
        with pytest.raises(UnreachableError, match="a chain of URLs"):
            folder.listed(chain)
    with pytest.raises(UnreachableError, match="may not lead out of the folder"):
        Address.of("memory://set").listed("a::b")


@pytest.mark.parametrize("path", ["/status/503/list.csv", "/short", "/loop"])
def test_a_table_on_a_bad_server_is_asked_for_again_and_has_a_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("covpool.storage.remote.time.sleep", lambda seconds: None)
    with limited(QUICK), pytest.raises((UsageError, OSError)) as caught:
        open_unlabeled(f"{server.url}{path}")
    assert server.url in str(caught.value)
    assert server.asked[path] > 1


def test_a_server_that_sends_headers_without_end_is_left(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time includes all retries."""
    monkeypatch.setattr("covpool.storage.remote.TABLE_TIMEOUTS", 1)
    monkeypatch.setattr("covpool.storage.remote.pauses_before", lambda retries: (0.01,) * 100)
    with limited(Requests(timeout=0.2, retries=0)):
        where = Address.of(f"{server.url}/drip-headers")
        for ask in (where.is_folder, where.exists, where.files_below, where.read):
            started = time.monotonic()
            with pytest.raises(ShardError, match="cannot be"):
                ask()
            assert time.monotonic() - started < 10
        for name, size in (("drip-headers.parquet", 100_000), ("drip", 100_000), ("drip", None)):
            started = time.monotonic()
            with pytest.raises(ShardError, match="cannot be read"):
                FileCache(tmp_path, 1 << 20).opened(f"{server.url}/{name}", "1", size)
            assert time.monotonic() - started < 10
        started = time.monotonic()
        with pytest.raises(ShardError, match="cannot be read: no complete answer in time"):
            read_parquet(where.parent, "drip-headers", lambda opened: None)
        assert time.monotonic() - started < 10


def test_parquet_on_a_server_that_fails_is_asked_for_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.storage.remote.time.sleep", lambda seconds: None)
    root = Address.of(f"{server.url}/status/503")
    with pytest.raises(ShardError, match=r"/status/503/a\.parquet cannot be read"):
        read_parquet(root, "a.parquet", lambda opened: None)
    assert server.asked["/status/503/a.parquet"] > 3
    before = server.asked.total()
    with pytest.raises(ShardError, match=r"/a\.parquet does not exist"):
        read_parquet(Address.of(server.url), "a.parquet", lambda opened: None)
    assert server.asked.total() == before + 2  # fsspec asks for the size in two ways
