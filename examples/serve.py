"""An exported model behind HTTP: one file to start from, not a framework.

    pip install fastapi uvicorn onnxruntime pillow
    covpool export runs/birds/bundle --out exported && python serve.py exported 8000
    curl --data-binary @bird.jpg http://127.0.0.1:8000/predict

Images that arrive together are classified together. Bodies, images, waiting requests and seconds have limits,
so that no client can take the server from the others. TLS, users and several machines are a proxy's business.
"""

import asyncio
import io
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image

MAX_BYTES, MAX_PIXELS, FORMATS = 10 << 20, 40_000_000, ("JPEG", "PNG", "WEBP")
MAX_BATCH, MAX_DELAY, MAX_WAITING, MAX_DECODING = 16, 0.004, 64, 4
BODY_SECONDS, ANSWER_SECONDS = 10.0, 20.0


class Batches:
    """Collects images into batches: those that wait, or come within a few milliseconds."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session, self.waiting = session, asyncio.Queue(MAX_WAITING)

    async def logits(self, pixels: np.ndarray) -> np.ndarray:
        answer = asyncio.get_running_loop().create_future()
        try:
            self.waiting.put_nowait((pixels, answer))
        except asyncio.QueueFull:
            raise HTTPException(503, "too many requests at once", {"Retry-After": "1"}) from None
        return await asyncio.wait_for(answer, ANSWER_SECONDS)

    async def run(self) -> None:
        while True:
            batch = [await self.waiting.get()]
            await asyncio.sleep(MAX_DELAY)
            while len(batch) < MAX_BATCH and not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            images = np.stack([pixels for pixels, _ in batch])
            try:
                (found,) = await asyncio.to_thread(self.session.run, None, {"images": images})
            except Exception as error:  # a batch fails, the server goes on
                for _, answer in batch:
                    answer.cancelled() or answer.set_exception(error)
                continue
            for (_, answer), logits in zip(batch, found, strict=True):
                answer.cancelled() or answer.set_result(logits)  # a client may have gone


def decoded(body: bytes, wanted: dict) -> np.ndarray:
    """The pixels that the model wants: the shorter side resized, the centre cut out."""
    try:
        image = Image.open(io.BytesIO(body), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise HTTPException(413, f"the image has more than {MAX_PIXELS:,} pixels")
        image = image.convert("RGB")
    except HTTPException:
        raise
    except Exception:  # Pillow raises a dozen kinds for a dozen ways of being broken
        raise HTTPException(422, f"the body is no image that can be read: {', '.join(FORMATS)}") from None
    scale, size = wanted["resize"] / min(image.size), wanted["size"]
    side = [max(round(length * scale), size) for length in image.size]
    image = image.resize(side, Image.Resampling[wanted["interpolation"].upper()])
    left, top = (side[0] - size) // 2, (side[1] - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


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
    names = about["classes"] or [str(i) for i in range(about["output"]["shape"][1])]
    batches = Batches(onnxruntime.InferenceSession(folder / "model.onnx"))
    decoding = asyncio.Semaphore(MAX_DECODING)

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
            raise HTTPException(408, "the body took too long") from None
        async with decoding:
            pixels = await asyncio.to_thread(decoded, body, about["preprocessing"])
        logits = await batches.logits(pixels)
        likely = np.exp(logits - logits.max())
        likely /= likely.sum()
        order = np.argsort(-likely)[: max(top, 1)]
        return [{"class": names[i], "probability": round(float(likely[i]), 6)} for i in order]

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(Path(sys.argv[1])), port=int(sys.argv[2]), log_level="warning", timeout_keep_alive=5)
