"""Short cases for ``.ci/soak.py``: ``.ci/hazards.py`` prints a line for each, and exits with 1 if one fails.

A clock that jumps, a disk that is full at a rename, AVIF and HEIC bombs, ONNX with external data, a host name
that changes its address, and a server of the Hub protocol that lies.
"""

import csv
import errno
import io
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import onnx
from PIL import Image

from covpool import create_model, save_model
from covpool.data.decode import EXTENSIONS, decode
from covpool.data.sources import open_unlabeled
from covpool.errors import BadImageError, UnreachableError
from covpool.export.targets import read_metadata
from covpool.inference import Files, Predict, Running, infer
from covpool.storage import http
from covpool.storage.remote import Requests, limited

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = "192.0.2.1"  # for documentation: no machine has it
RUNNING = Running(batch_size=4, workers=1, device="cpu")


def encoded(image_format: str, side: int = 64) -> bytes:
    """Return an image in random colors."""
    stream = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.randbytes(3 * side * side)).save(stream, image_format)
    return stream.getvalue()


def prepared(folder: Path) -> tuple[Path, Path, list[list[str]]]:
    """Return a bundle, a folder of images, and the rows of an undisturbed job."""
    data = folder / "data"
    data.mkdir()
    for i in range(12):
        (data / f"{i:02d}.jpg").write_bytes(encoded("JPEG"))
    model = create_model("test_resnet", dim=8, num_classes=3, image_size=64)
    bundle = save_model(model, folder / "bundle")
    return bundle, data, rows(bundle, data, folder / "undisturbed")


def rows(bundle: Path, data: Path, out: Path) -> list[list[str]]:
    """Run or resume a job, and return all its rows."""
    infer(bundle, data, out, Predict(top=1), Files("csv", 4), RUNNING)
    found = []
    for path in sorted(out.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found += list(csv.reader(file))[1:]
    return found


def jumping_clock(folder: Path) -> str:
    """Add or subtract up to a day at every look at the clock."""
    bundle, data, expected = prepared(folder)
    real = time.time

    def jump() -> float:
        return real() + random.uniform(-86400, 86400)

    with mock.patch("time.time", jump):
        assert rows(bundle, data, folder / "out") == expected
    return f"{len(expected)} rows equal"


def full_disk_at_a_rename(folder: Path) -> str:
    """Fail each rename of a job in turn, and resume."""
    bundle, data, expected = prepared(folder)
    failures = 0
    for position in range(20):
        out, left = folder / f"out{position}", iter([False] * position + [True])

        def full(*names: object, left=left, real=os.replace, **options: object) -> None:  # type: ignore[no-untyped-def]
            if next(left, False):
                raise OSError(errno.ENOSPC, "No space left on device", str(names[1]))
            real(*names, **options)

        try:
            with mock.patch("os.replace", full):
                rows(bundle, data, out)
        except OSError:
            failures += 1
        else:
            if next(left, False):  # the job has fewer renames
                break
        assert rows(bundle, data, out) == expected
    assert failures > 2, failures
    return f"{failures} renames failed, rows equal after each"


def bombs(folder: Path) -> str:
    """Let small AVIF and HEIC files claim 60,000 by 60,000 pixels."""
    found = []
    for image_format in sorted({"AVIF", "HEIF"} & EXTENSIONS.keys()):
        data = bytearray(encoded(image_format))
        place = data.index(b"ispe") + 8
        data[place : place + 8] = 2 * (60_000).to_bytes(4, "big")
        before = time.monotonic()
        try:
            decode(bytes(data))
        except BadImageError as error:
            found.append(f"{image_format}: {error.reason}")
        else:
            raise AssertionError(f"the {image_format} was decoded")
        assert time.monotonic() - before < 10
    assert found
    return ", ".join(found)


def external_data(folder: Path) -> str:
    """Read the metadata of an ONNX file whose weights are in another file: a pipe, which would block."""
    os.mkfifo(folder / "secret")
    weights = onnx.helper.make_tensor("w", 1, [1], [1.0])
    weights.ClearField("float_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "../secret"), ("offset", "0"), ("length", "4")):
        weights.external_data.add(key=key, value=value)
    value = onnx.helper.make_tensor_value_info("x", 1, [1])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [value], [value], initializer=[weights])
    model = onnx.helper.make_model(graph)
    onnx.helper.set_model_props(model, {"covpool": '"0.1.0"'})
    (folder / "inside").mkdir()
    (folder / "inside" / "model.onnx").write_bytes(model.SerializeToString())
    names: list[str] = []
    sys.addaudithook(lambda event, words: names.append(str(words[0])) if event == "open" else None)
    read_metadata(folder / "inside" / "model.onnx")
    assert any(name.endswith("model.onnx") for name in names)
    assert not any("secret" in name for name in names)
    return "not opened"


def changing_address(folder: Path) -> str:
    """Resolve a host name to a public address first, and to this machine from then on."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def do_HEAD(self) -> None:
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    looked_up: list[str] = []

    def resolve(host: str, port: int, *_: object, **options: object) -> list[object]:
        looked_up.append(host)
        address = PUBLIC if len(looked_up) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    (folder / "list.csv").write_text(f"path\nhttp://changing.example:{server.server_port}/1.jpg\n")
    real = http.is_private

    def is_private(address: str) -> bool:
        return address != PUBLIC and real(address)

    limits = Requests(timeout=8, connect_timeout=1, retries=2)
    with (
        limited(limits),
        mock.patch("socket.getaddrinfo", resolve),
        mock.patch("covpool.storage.http.is_private", is_private),
    ):
        images = open_unlabeled(folder / "list.csv")
        until = time.monotonic() + 60
        while len(looked_up) < 2 and time.monotonic() < until:  # the address is cached for 10 seconds
            try:
                images.read(0)
            except UnreachableError:
                time.sleep(1)
                continue
            raise AssertionError("the image was read")
    server.shutdown()
    assert len(looked_up) > 1
    assert not asked, asked
    return f"{len(looked_up)} lookups, no request"


def lying_hub(folder: Path) -> str:
    """Load bundles from a server that truncates, changes and redirects."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/models/hub/test_faults.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip().splitlines()[-1]


CASES = (jumping_clock, full_disk_at_a_rename, bombs, external_data, changing_address, lying_hub)

if __name__ == "__main__":
    for case in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            print(f"{case.__name__.replace('_', ' ')}: {case(Path(scratch))}", flush=True)
