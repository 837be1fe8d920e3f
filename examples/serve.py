"""Serve an exported model over HTTP: one file to start from, not a framework.

    pip install fastapi uvicorn onnxruntime pillow
    covpool export runs/birds/bundle birds --out exported && python serve.py exported 8000
    curl --data-binary @bird.jpg http://127.0.0.1:8000/predict

Images that arrive together are classified in one batch. The size of bodies and images, the number of requests
and their time are limited, so that no request can block the others. Processes decode the images. A process
that takes too long is ended and replaced. Large and slow images are decoded one at a time. Use a proxy for
TLS, users, several machines, and clients that connect and send nothing.
"""

import asyncio
import io
import json
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image, ImageOps

MAX_BYTES, MAX_PIXELS, MAX_RATIO, FORMATS = 10 << 20, 40_000_000, 20, ("JPEG", "PNG", "WEBP")
MAX_BATCH, MAX_DELAY, MAX_REQUESTS, MAX_DECODING = 16, 0.004, 64, 4
# A progressive JPEG of thousands of empty scans takes minutes to decode.
MAX_SCANS, START_OF_SCAN = 200, b"\xff\xda"
# Decoding more takes up to a second and half a gigabyte. Each scan of a JPEG is a pass over all pixels.
LARGE_PIXELS, MAX_LARGE = 4_000_000, 8
BODY_SECONDS, ANSWER_SECONDS = 10.0, 20.0
SMALL_SECONDS, LARGE_SECONDS = 0.5, 10.0  # deadlines of a decoder


class Decoders:
    """Threads with a process each, which decodes. A process that misses its deadline is ended and replaced.

    Args:
        processes: number of processes.
        wanted: the preprocessing of the model.
        pixels: images of more pixels, counted once per scan, are returned as None.
        seconds: the deadline; after it, the result is None too.
        niceness: how much the processes leave the CPU to others.
    """

    def __init__(self, processes: int, wanted: dict, pixels: float, seconds: float, niceness: int) -> None:
        self.threads, self.own, self.seconds = ThreadPoolExecutor(processes), threading.local(), seconds
        self.arguments = wanted, pixels, niceness
        self.context = multiprocessing.get_context("forkserver")
        # New processes share these modules, so that they start in milliseconds.
        self.context.set_forkserver_preload(["fastapi", "onnxruntime", "uvicorn", "PIL.WebPImagePlugin"])

    async def pixels(self, body: bytes) -> np.ndarray | None:
        answer = await asyncio.get_running_loop().run_in_executor(self.threads, self.answer, body)
        if isinstance(answer, tuple):
            raise HTTPException(*answer)
        return answer

    def answer(self, body: bytes) -> np.ndarray | tuple[int, str] | None:
        if not hasattr(self.own, "pipe"):
            self.own.pipe, theirs = self.context.Pipe()
            self.own.process = self.context.Process(target=work, args=(theirs, *self.arguments), daemon=True)
            self.own.process.start()
            theirs.close()
            self.own.pipe.recv()  # it is ready
        try:
            self.own.pipe.send_bytes(body or b" ")
            if self.own.pipe.poll(self.seconds):
                return self.own.pipe.recv()
        except (EOFError, OSError):  # the decoder crashed
            pass
        self.own.process.kill()
        self.own.process.join()
        self.own.pipe.close()
        del self.own.pipe
        return None


def work(pipe, wanted: dict, pixels: float, niceness: int) -> None:
    """Decode images until the server closes the pipe."""
    os.nice(niceness)
    pipe.send("ready")
    while True:
        try:
            body = pipe.recv_bytes()
        except EOFError:
            return
        try:
            image = opened(body)
            scans = max(body.count(START_OF_SCAN), 1) if image.format == "JPEG" else 1
            pipe.send(decoded(image, wanted) if image.width * image.height * scans <= pixels else None)
        except HTTPException as error:
            pipe.send((error.status_code, error.detail))


class Batches:
    """A queue that groups waiting images, and those of the next few milliseconds, into batches."""

    def __init__(self, session: onnxruntime.InferenceSession, wanted: dict) -> None:
        self.session, self.waiting, self.large_waiting = session, asyncio.Queue(), 0
        self.small = Decoders(MAX_DECODING, wanted, LARGE_PIXELS, SMALL_SECONDS, 0)
        self.large = Decoders(1, wanted, float("inf"), LARGE_SECONDS, 10)

    async def logits(self, body: bytes) -> np.ndarray:
        pixels = await self.small.pixels(body)
        if pixels is None:
            pixels = await self.large_pixels(body)
        answer = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((pixels, answer))
        return await answer

    async def large_pixels(self, body: bytes) -> np.ndarray:
        if self.large_waiting >= MAX_LARGE:
            raise HTTPException(503, "the server is busy with large images", {"Retry-After": "5"})
        self.large_waiting += 1
        try:
            pixels = await self.large.pixels(body)
        finally:
            self.large_waiting -= 1
        if pixels is None:
            raise HTTPException(413, f"the image took longer than {LARGE_SECONDS:g} seconds to decode")
        return pixels

    async def run(self) -> None:
        while True:
            batch = [await self.waiting.get()]
            await asyncio.sleep(MAX_DELAY)
            while len(batch) < MAX_BATCH and not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            batch = [(pixels, answer) for pixels, answer in batch if not answer.done()] or batch[:1]
            try:
                images = np.stack([pixels for pixels, _ in batch])
                (found,) = await asyncio.to_thread(self.session.run, None, {"images": images})
            except Exception as error:  # the batch fails, the server keeps running
                for _, answer in batch:
                    answer.done() or answer.set_exception(error)
                continue
            for (_, answer), logits in zip(batch, found, strict=True):
                answer.done() or answer.set_result(logits)  # a client may have disconnected


def no_image() -> HTTPException:
    return HTTPException(422, f"the body is no image that can be read: {', '.join(FORMATS)}")


def opened(body: bytes) -> Image.Image:
    """Open an image without decoding its pixels; raise if it is too large or decodes slowly."""
    if body.startswith(b"\xff\xd8") and body.count(START_OF_SCAN) > MAX_SCANS:
        raise HTTPException(413, f"more than {MAX_SCANS} scans in a JPEG")
    try:
        image = Image.open(io.BytesIO(body), formats=FORMATS)
    except Exception:  # Pillow raises many kinds of exceptions for broken images
        raise no_image() from None
    if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_RATIO * min(image.size):
        raise HTTPException(413, f"more than {MAX_PIXELS:,} pixels, or {MAX_RATIO} times as long as wide")
    return image


def decoded(image: Image.Image, wanted: dict) -> np.ndarray:
    """Return the pixels for the model: the shorter side resized, the center cropped."""
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16-bit grayscale, which Pillow would clip at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    except Exception:
        raise no_image() from None
    size, how = wanted["size"], Image.Resampling[wanted["interpolation"].upper()]
    side = [int(length * wanted["resize"] / min(image.size) + 1e-6) for length in image.size]
    left, top = round((side[0] - size) / 2), round((side[1] - size) / 2)
    return np.asarray(image.resize(side, how).crop((left, top, left + size, top + size)))


async def body_of(request: Request) -> bytes:
    """Read the body in parts; raise once it is too large, so that no larger body is held in memory."""
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > MAX_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BYTES:,} bytes")
        body += part
    return bytes(body)


def make_app(folder: Path) -> FastAPI:
    about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    assert (about["preprocessing"]["in_graph"], about["preprocessing"]["crop_mode"]) == (True, "center")
    names = about["classes"] or [str(i) for i in range(about["output"]["shape"][1])]
    batches = Batches(onnxruntime.InferenceSession(folder / "model.onnx"), about["preprocessing"])

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(request: Request, top: int = 5) -> list[dict]:
        try:
            body = await asyncio.wait_for(body_of(request), BODY_SECONDS)
        except TimeoutError:
            raise HTTPException(408, "the body took too long", {"Connection": "close"}) from None
        try:
            logits = await asyncio.wait_for(batches.logits(body), ANSWER_SECONDS)
        except TimeoutError:
            raise HTTPException(503, "the server is busy", {"Retry-After": "5"}) from None
        likely = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        order = np.argsort(-likely)[: max(top, 1)]
        return [{"class": names[i], "probability": round(float(likely[i]), 6)} for i in order]

    return app


if __name__ == "__main__":
    limits = {"limit_concurrency": MAX_REQUESTS, "timeout_keep_alive": 5}  # further requests get a 503
    uvicorn.run(make_app(Path(sys.argv[1])), port=int(sys.argv[2]), log_level="warning", **limits)
