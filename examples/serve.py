"""Serve an exported model over HTTP: one file to start from, not a framework.

    pip install fastapi uvicorn onnxruntime pillow
    covpool export runs/birds/bundle birds --out exported && python serve.py exported 8000
    curl --data-binary @bird.jpg http://127.0.0.1:8000/predict

Images that arrive together are classified in one batch. The size of bodies and images, the number of requests
and their time are limited, so that no request can block the others. Large images are decoded one at a time.
Use a proxy for TLS, users, several machines, and clients that connect and send nothing.
"""

import asyncio
import io
import json
import sys
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
MAX_SCANS = 200  # a progressive JPEG of thousands of empty scans takes minutes to decode
LARGE_PIXELS = 4_000_000  # decoding a larger image takes up to a second and half a gigabyte
BODY_SECONDS, ANSWER_SECONDS = 10.0, 20.0


class Batches:
    """A queue that groups waiting images, and those of the next few milliseconds, into batches."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session, self.waiting = session, asyncio.Queue()
        # After a timeout, an image that waits here is dropped; one that is being decoded keeps its thread.
        self.small, self.large = ThreadPoolExecutor(MAX_DECODING), ThreadPoolExecutor(1)

    async def logits(self, body: bytes, wanted: dict) -> np.ndarray:
        loop = asyncio.get_running_loop()
        image = await loop.run_in_executor(self.small, opened, body)
        threads = self.large if image.width * image.height > LARGE_PIXELS else self.small
        pixels = await loop.run_in_executor(threads, decoded, image, wanted)
        answer = loop.create_future()
        self.waiting.put_nowait((pixels, answer))
        return await answer

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
    if body.startswith(b"\xff\xd8") and body.count(b"\xff\xda") > MAX_SCANS:
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
    batches = Batches(onnxruntime.InferenceSession(folder / "model.onnx"))

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
            logits = await asyncio.wait_for(batches.logits(body, about["preprocessing"]), ANSWER_SECONDS)
        except TimeoutError:
            raise HTTPException(503, "the server is busy", {"Retry-After": "5"}) from None
        likely = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        order = np.argsort(-likely)[: max(top, 1)]
        return [{"class": names[i], "probability": round(float(likely[i]), 6)} for i in order]

    return app


if __name__ == "__main__":
    limits = {"limit_concurrency": MAX_REQUESTS, "timeout_keep_alive": 5}  # further requests get a 503
    uvicorn.run(make_app(Path(sys.argv[1])), port=int(sys.argv[2]), log_level="warning", **limits)
