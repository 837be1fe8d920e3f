"""Clients of the server: many at once, broken requests, oversize requests and slow clients."""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections import Counter
from dataclasses import dataclass

import httpx
import numpy as np
from PIL import Image

from tests.data.pictures import encode


def jpeg(side: int = 300, seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (side // 10, side // 10, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize((side, side)).save(stream, "JPEG")
    return stream.getvalue()


def bomb() -> bytes:
    """Return an image of 10,000 × 10,000 pixels in a few kilobytes."""
    stream = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(stream, "PNG")
    return stream.getvalue()


MALFORMED = {
    "nothing": b"",
    "text": b"hello" * 100,
    "half a JPEG": jpeg()[:2000],
    "noise that begins as a PNG": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20,
    "a PDF": b"%PDF-1.7\n" + b"0" * 1000,
    "a GIF, which is not taken": encode(Image.new("P", (64, 64)), "GIF"),
}


@dataclass(frozen=True)
class Load:
    """The results of many clients: answers by status, seconds per answer, and total seconds."""

    statuses: Counter[int]
    seconds: tuple[float, ...]
    total: float

    @property
    def per_second(self) -> float:
        return self.statuses[200] / self.total

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98]


async def load(url: str, seconds: float, clients: int = 8) -> Load:
    """Send as many requests as possible, with images of several sizes."""
    bodies = [jpeg(side, side) for side in (200, 300, 640)]
    statuses: Counter[int] = Counter()
    taken: list[float] = []
    started = time.perf_counter()

    async def one(number: int, client: httpx.AsyncClient) -> None:
        while time.perf_counter() - started < seconds:
            before = time.perf_counter()
            answer = await client.post(f"{url}/predict", content=bodies[len(taken) % len(bodies)])
            statuses[answer.status_code] += 1
            taken.append(time.perf_counter() - before)

    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(one(number, client) for number in range(clients)))
    return Load(statuses, tuple(taken), time.perf_counter() - started)


async def drip(url: str) -> int:
    """Send a byte every half second; return the status, or 0 if the connection is closed."""

    async def bytes_slowly():  # type: ignore[no-untyped-def]
        for byte in jpeg()[:28]:  # for fourteen seconds
            yield bytes([byte])
            await asyncio.sleep(0.5)

    async with httpx.AsyncClient(timeout=60) as client:
        try:
            return (await client.post(f"{url}/predict", content=bytes_slowly())).status_code
        except httpx.TransportError:
            return 0
