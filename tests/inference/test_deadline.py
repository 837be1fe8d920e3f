"""A decoder that hangs becomes a row with an error, and the other rows are all there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from PIL import Image, ImageFile

from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing
from covpool.errors import WORKER_DIED, DataError
from covpool.inference import Files, Predict, Running, infer
from covpool.inference.work import Decoder, Unit, decoded_batches
from covpool.inference.workers import Deadline
from covpool.storage.remote import Requests
from tests.data.pictures import encode
from tests.data.test_decode_time import jpeg_of_scans
from tests.inference.small import picture, rows_of, write_folder

SECONDS = 1.5
SLOW = f"too slow: it took longer than {SECONDS} seconds to decode"


def sleep_forever(image: ImageFile.ImageFile) -> None:
    while True:
        time.sleep(3600)


def test_decoders_that_hang_are_ended_and_the_other_rows_are_there(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image spins in libjpeg for minutes, two sleep in a decoder of Pillow."""
    monkeypatch.setattr("covpool.data.decode.MAX_SCANS", 1_000_000)
    monkeypatch.setattr("PIL.GifImagePlugin.GifImageFile.load_prepare", sleep_forever)
    files = {f"{i:02d}.jpg": picture(i) for i in range(24)}
    gif = encode(Image.new("P", (64, 64)), "GIF")
    slow = {"03.jpg": jpeg_of_scans(100_000), "04.jpg": gif, "17.jpg": gif}
    data, out = write_folder(tmp_path / "data", files | slow), tmp_path / "out"
    started = time.monotonic()
    running = Running(batch_size=4, workers=2)
    # A signal of the caller must not disable the deadline.
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        done = infer(
            bundle, data, out, Predict(), Files("parquet", 8), running, requests=Requests(timeout=SECONDS)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 60
    assert done.bad_images == 3
    found = {row["id"]: row["error"] for row in rows_of(out)}
    assert found == {name: SLOW if name in slow else None for name in files}


def test_the_time_between_images_does_not_count() -> None:
    def wait() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        deadline = Deadline(0.2)
        with deadline(0):
            pass
        time.sleep(0.6)

    process = multiprocessing.get_context("fork").Process(target=wait)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_workers_end_when_the_main_process_is_killed(tmp_path: Path) -> None:
    images = open_unlabeled(write_folder(tmp_path, {f"{i}.jpg": picture(i) for i in range(9)}))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")

    def start() -> None:
        running = Running(batch_size=1, workers=2)
        for _ in decoded_batches(images, [Unit("all", 0, 9)], Decoder(Preprocessing(64)), running):
            sender.send([child.pid for child in multiprocessing.active_children()])
            time.sleep(60)

    process = context.Process(target=start)
    process.start()
    assert receiver.poll(30)
    workers = receiver.recv()
    process.kill()
    process.join()
    assert len(workers) == 2
    until = time.monotonic() + 20
    while left := [pid for pid in workers if is_running(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_stops_the_job(tmp_path: Path) -> None:
    images = open_unlabeled(write_folder(tmp_path, {"0.jpg": picture(0), "1.jpg": picture(1)}))

    class Killed(Decoder):
        def __call__(self, data: bytes) -> object:  # type: ignore[override]
            os.kill(os.getpid(), signal.SIGKILL)

    batches = decoded_batches(images, [Unit("all", 0, 2)], Killed(Preprocessing(64)), Running(workers=1))
    with pytest.raises(DataError, match=WORKER_DIED):
        list(batches)


def test_an_internal_error_in_a_worker_has_its_traceback(tmp_path: Path) -> None:
    images = open_unlabeled(write_folder(tmp_path, {"0.jpg": picture(0)}))

    class Wrong(Decoder):
        def __call__(self, data: bytes) -> object:  # type: ignore[override]
            return {}["key"]

    batches = decoded_batches(images, [Unit("all", 0, 1)], Wrong(Preprocessing(64)), Running(workers=1))
    with pytest.raises(RuntimeError, match=r"(?s)an internal error.*test_deadline\.py.*KeyError: 'key'"):
        list(batches)
