"""The example server, in a separate process and under load."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from covpool import create_model, load_model, save_model
from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.export import ExportOptions, export_model
from tests.data.pictures import SPARROWS, encode, needs_sparrows
from tests.data.test_decode_time import jpeg_of_scans

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
from tests.examples.load import MALFORMED, bomb, drip, jpeg, load  # noqa: E402

SERVER = Path(__file__).parents[2] / "examples" / "serve.py"
pytestmark = [
    needs_sparrows,
    pytest.mark.skipif(not SERVER.exists(), reason="tests without the checkout around them"),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=16, num_classes=21)
    model.classes = tuple(sorted(path.name for path in (SPARROWS / "train").iterdir()))
    folder = tmp_path_factory.mktemp("model") / "bundle"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def exported(bundle: Path) -> Path:
    export_model(
        bundle,
        SPARROWS,
        bundle.parent / "exported",
        options=ExportOptions(formats=("onnx",), limit=8, rounds=3),
    )
    return bundle.parent / "exported"


class Server:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([sys.executable, str(SERVER), str(folder), str(port)])
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.post(f"{self.url}/predict", content=jpeg())
                return
            except httpx.TransportError:
                assert self.process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def memory(self, field: str) -> int:
        """Return a field of /proc, summed over the server and its decoders, in bytes."""
        parents = {}
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                fields = dict(re.findall(r"(\w+):\s+(\d+)", status.read_text()))
                parents[int(fields["Pid"])] = int(fields["PPid"]), int(fields.get(field, 0)) << 10
        family = {self.process.pid}
        while new := {pid for pid, (parent, _) in parents.items() if parent in family} - family:
            family |= new
        return sum(parents[pid][1] for pid in family)

    def resident(self) -> int:
        """Return the resident memory in bytes."""
        return self.memory("VmRSS")


def example() -> Any:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("serve", SERVER)
    assert spec is not None
    assert spec.loader is not None
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    return serve


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[Server]:
    made = Server(exported)
    yield made
    made.process.terminate()
    made.process.wait(30)


def test_its_answers_are_those_of_the_bundle(server: Server, bundle: Path) -> None:
    model = load_model(bundle).eval()
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    for file in sorted((SPARROWS / "test").rglob("*.jpg"))[::100]:
        body = file.read_bytes()
        answer = httpx.post(f"{server.url}/predict?top=21", content=body).json()
        with torch.inference_mode():
            likely = model(transform(decode(body))[None]).softmax(1)[0]
        assert answer[0]["class"] == model.classes[int(likely.argmax())]  # type: ignore[index]
        assert answer[0]["probability"] == pytest.approx(float(likely.max()), abs=0.01)
        assert sum(one["probability"] for one in answer) == pytest.approx(1, abs=1e-3)


def test_its_pixels_are_those_that_were_compared() -> None:
    """The images are 16-bit gray, and gray with transparency."""
    serve = example()
    slope = np.linspace(0, 1, 256 * 256).reshape(256, 256)
    grey = Image.fromarray((slope * 65535).astype(np.uint16))
    clear = Image.merge("LA", [Image.fromarray((layer * 255).astype(np.uint8)) for layer in (slope, slope.T)])
    for image in (grey, clear):
        body = encode(image, "PNG")
        wanted = {"resize": 256, "size": 256, "interpolation": "bicubic"}
        np.testing.assert_array_equal(serve.decoded(serve.opened(body), wanted), np.asarray(decode(body)))


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_malformed_bodies_are_the_clients_fault(server: Server, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/predict", content=body)
    assert answer.status_code == 422
    assert "no image" in answer.json()["detail"]


def test_oversize(server: Server) -> None:
    assert httpx.post(f"{server.url}/predict", content=b"0" * (11 << 20)).status_code == 413
    answer = httpx.post(f"{server.url}/predict", content=bomb())
    assert answer.status_code == 413
    assert "pixels" in answer.json()["detail"]


def test_lines_are_refused() -> None:
    serve = example()
    with pytest.raises(serve.HTTPException, match="20 times as long as wide"):
        serve.opened(encode(Image.new("L", (2100, 100)), "PNG"))


def test_large_images_are_left_to_the_other_decoder() -> None:
    """Each scan of a JPEG counts as all of its pixels."""
    serve = example()
    wanted = {"resize": 64, "size": 64, "interpolation": "bicubic"}
    answers: list[Any] = []
    bodies = [jpeg(200), jpeg(300), encode(Image.open(io.BytesIO(jpeg(200))), "JPEG", progressive=True)]

    class Pipe:
        def recv_bytes(self) -> bytes:
            if not bodies:
                raise EOFError
            return bodies.pop(0)

        send = staticmethod(answers.append)

    serve.work(Pipe(), wanted, 200 * 200, 0)
    assert answers[0] == "ready"
    assert answers[1].shape == (64, 64, 3)
    assert answers[2:] == [None, None]


def test_few_large_images_wait() -> None:
    serve = example()
    batches = serve.Batches(None, {})
    batches.large_waiting = serve.MAX_LARGE
    batches.large.pixels = None  # it is not asked
    with pytest.raises(serve.HTTPException, match="busy with large images"):
        asyncio.run(batches.large_pixels(b""))


def test_an_answer_takes_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = example()
    about = {"preprocessing": {"in_graph": True, "crop_mode": "center"}, "classes": ["wren"]}
    (tmp_path / "model.json").write_text(json.dumps(about))
    monkeypatch.setattr(serve.onnxruntime, "InferenceSession", lambda path: None)
    monkeypatch.setattr(serve.Batches, "logits", lambda self, body: asyncio.sleep(5, np.zeros(1)))
    monkeypatch.setattr(serve, "ANSWER_SECONDS", 0.1)

    async def ask() -> Any:
        transport = httpx.ASGITransport(serve.make_app(tmp_path))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/predict", content=b"image")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["detail"]) == (503, "the server is busy")


def test_further_requests_are_refused_at_once(server: Server) -> None:
    """Clients send the head of a request, and no body: as many as allowed wait, and the others get a 503."""
    most = example().MAX_REQUESTS
    address = (httpx.URL(server.url).host, httpx.URL(server.url).port)
    head = b"POST /predict HTTP/1.1\r\nHost: server\r\nContent-Length: 9\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(most + 30)]
        for client in clients:
            client.sendall(head)
        answered = select.select(clients, [], [], 20)[0]
        assert answered[0].recv(100).startswith(b"HTTP/1.1 503")
        until = time.monotonic() + 8  # shorter than the server waits for a body
        while len(select.select(clients, [], [], 0)[0]) < 30:
            assert time.monotonic() < until
            time.sleep(0.1)
    until = time.monotonic() + 20
    while httpx.post(f"{server.url}/predict", content=jpeg()).status_code != 200:
        assert time.monotonic() < until


def test_a_jpeg_that_decodes_slowly_is_refused_at_once(server: Server) -> None:
    started = time.monotonic()
    answer = httpx.post(f"{server.url}/predict", content=jpeg_of_scans(20_000), timeout=60)
    assert answer.status_code == 413
    assert "scans" in answer.json()["detail"]
    assert time.monotonic() - started < 2


def test_slow_clients_do_not_hold_up_the_others(server: Server) -> None:
    async def both() -> tuple[list[int], int]:
        slow = [asyncio.create_task(drip(server.url)) for _ in range(20)]
        await asyncio.sleep(1)
        found = await load(server.url, 2, clients=2)
        return [await one for one in slow], found.statuses[200]

    statuses, answered = asyncio.run(both())
    assert answered > 5
    assert set(statuses) <= {408, 0}


@pytest.mark.slow
def test_large_images_do_not_hold_up_the_others_or_fill_the_memory(server: Server) -> None:
    """Send 40 images of 40 million pixels, each of some kilobytes."""
    body = encode(Image.new("P", (8000, 5000)), "PNG", transparency=0)
    before = server.resident()

    async def one(client: Any, content: bytes) -> tuple[int, float]:
        started = time.perf_counter()
        answer = await client.post(f"{server.url}/predict", content=content)
        return answer.status_code, time.perf_counter() - started

    async def all_of_them() -> tuple[list[tuple[int, float]], tuple[int, float]]:
        async with httpx.AsyncClient(timeout=120) as client:
            large = [asyncio.create_task(one(client, body)) for _ in range(40)]
            await asyncio.sleep(1)
            small = await one(client, jpeg())
            return [await each for each in large], small

    large, small = asyncio.run(all_of_them())
    most = server.memory("VmHWM")
    print(f"{small[1]:.1f} s for a small image, {max(large)[1]:.1f} s for large ones, {most >> 20} MiB")
    assert small[0] == 200
    assert small[1] < 10
    assert {status for status, _ in large} <= {200, 503}
    assert max(seconds for _, seconds in large) < 20 + 5
    assert most - before < 1 << 30


def beside_slow_jpegs(server: Server, seconds: int) -> None:
    """Send two good and four slow JPEGs per second; every good one is answered within 2 s."""
    # Two of the slow ones have more scans than the limit, and two are at the limit.
    slow = [jpeg_of_scans(20_000), jpeg_of_scans(200, 6000), jpeg_of_scans(20_000), jpeg_of_scans(200, 2000)]
    answers: list[tuple[bool, int, float]] = []

    async def one(client: Any, is_good: bool, content: bytes) -> None:
        started = time.perf_counter()
        answer = await client.post(f"{server.url}/predict", content=content)
        answers.append((is_good, answer.status_code, time.perf_counter() - started))

    async def send_all() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            sent = []
            for second in range(seconds):
                bodies = [(False, body) for body in slow]
                bodies[1:1] = bodies[4:4] = [(True, jpeg(seed=second))]
                for is_good, body in bodies:
                    sent.append(asyncio.create_task(one(client, is_good, body)))
                    await asyncio.sleep(1 / len(bodies))
            await asyncio.gather(*sent)

    asyncio.run(send_all())
    good = [(status, taken) for is_good, status, taken in answers if is_good]
    statuses = Counter(status for is_good, status, _ in answers if not is_good)
    median, longest = statistics.median(taken for _, taken in good), max(taken for _, taken in good)
    print(
        f"{len(good)} good ones: median {median:.2f} s, longest {longest:.2f} s; slow ones: {dict(statuses)}"
    )
    assert {status for status, _ in good} == {200}
    assert longest < 2
    assert len(good) == 2 * seconds
    assert set(statuses) <= {200, 413, 503}


@pytest.mark.slow
def test_good_requests_beside_slow_jpegs(server: Server) -> None:
    beside_slow_jpegs(server, 60)


def test_a_decoder_that_hangs_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = example()
    monkeypatch.setattr(serve, "work", hanging)
    decoders = serve.Decoders(1, {}, float("inf"), 0.5, 0)
    started = time.monotonic()
    assert decoders.answer(b"hang") is None
    assert time.monotonic() - started < 240  # it would sleep for an hour; a busy machine starts slowly
    first = decoders.own.process
    assert decoders.answer(b"good") == "decoded"
    assert decoders.own.process is not first
    assert not first.is_alive()
    decoders.own.process.kill()


def hanging(pipe: Any, wanted: dict[str, Any], pixels: float, niceness: int) -> None:
    pipe.send("ready")
    while True:
        if pipe.recv_bytes() == b"hang":
            time.sleep(3600)
        pipe.send("decoded")


def settled(server: Server) -> int:
    """Return the memory once all threads and batch sizes have been used; with a leak it never settles."""
    memory = 0
    for _ in range(20):
        before, memory = memory, server.resident()
        if memory - before < 0.005 * memory:
            break
        asyncio.run(load(server.url, 2))
    return memory


def under_load(server: Server, seconds: float) -> None:
    before = settled(server)
    found = asyncio.run(load(server.url, seconds))
    grown = server.resident() - before
    print(
        f"{found.statuses[200]} answers in {found.total:.0f} s: {found.per_second:.0f} a second, "
        f"p99 {1e3 * found.p99:.0f} ms, memory {before / 2**20:.0f} MiB, {grown / 2**20:+.1f} MiB"
    )
    assert set(found.statuses) == {200}
    assert grown < 0.05 * before
    assert server.process.poll() is None


@pytest.mark.slow
def test_full_load(server: Server) -> None:
    under_load(server, 4)


@pytest.mark.slow
def test_a_minute_of_full_load(server: Server) -> None:
    under_load(server, 60)
