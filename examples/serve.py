"""An exported model behind HTTP: one file to start from, not a framework.

    pip install fastapi uvicorn onnxruntime pillow
    covpool export runs/birds/bundle --out exported && python serve.py exported 8000
    curl --data-binary @bird.jpg http://127.0.0.1:8000/predict

Images that arrive together are classified together. Bodies, images, waiting requests and seconds have limits,
so that no request can take the server from the others. Large images are decoded one at a time. TLS, users,
several machines, and clients that connect and say nothing are a proxy's business.
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
LARGE_PIXELS = 4_000_000  # a larger image takes up to a second and half a gigabyte
BODY_SECONDS, ANSWER_SECONDS = 10.0, 20.0


class Batches:
    """Collects images into batches: those that wait, or come within a few milliseconds."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session, self.waiting = session, asyncio.Queue()
        # An image that waits here too long is dropped; one that is being decoded keeps its thread.
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
            except Exception as error:  # a batch fails, the server goes on
                for _, answer in batch:
                    answer.done() or answer.set_exception(error)
                continue
            for (_, answer), logits in zip(batch, found, strict=True):
                answer.done() or answer.set_result(logits)  # a client may have gone


def no_image() -> HTTPException:
    return HTTPException(422, f"the body is no image that can be read: {', '.join(FORMATS)}")


def opened(body: bytes) -> Image.Image:
    """The image by its header, unless it is too large; its pixels are not decoded yet."""
    try:
        image = Image.open(io.BytesIO(body), formats=FORMATS)
    except Exception:  # Pillow raises a dozen kinds for a dozen ways of being broken
        raise no_image() from None
    if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_RATIO * min(image.size):
        raise HTTPException(413, f"more than {MAX_PIXELS:,} pixels, or {MAX_RATIO} times as long as wide")
    return image


def decoded(image: Image.Image, wanted: dict) -> np.ndarray:
    """The pixels that the model wants: the shorter side resized, the centre cut out."""
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # grey of 16 bits, which Pillow would cut off at 255
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
    """The body, unless it is too large; read as it comes, so that nothing larger is ever held."""
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
    limits = {"limit_concurrency": MAX_REQUESTS, "timeout_keep_alive": 5}  # more requests than that get a 503
    uvicorn.run(make_app(Path(sys.argv[1])), port=int(sys.argv[2]), log_level="warning", **limits)
