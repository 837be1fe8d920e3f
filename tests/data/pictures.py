"""Image files, created in memory."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
SPARROWS, TINY10 = SHARED / "sparrows", SHARED / "tiny10"

needs_sparrows = pytest.mark.skipif(not SPARROWS.is_dir(), reason="the sparrows are not next to the project")
needs_tiny10 = pytest.mark.skipif(not TINY10.is_dir(), reason="tiny10 is not next to the project")

# The colors of the four corners show the orientation of an image and errors in its colors.
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, image_format, **options)
    return stream.getvalue()


def jpeg(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    return encode(Image.new("RGB", size, colour), "JPEG", quality=95)


def corners() -> Image.Image:
    """Return a 24×16 image: red and green above, blue and white below."""
    image = Image.new("RGB", (24, 16), RED)
    image.paste(GREEN, (12, 0, 24, 8))
    image.paste(BLUE, (0, 8, 12, 16))
    image.paste(WHITE, (12, 8, 24, 16))
    return image


def seen(image: Image.Image) -> list[tuple[int, ...]]:
    """Return the colors in the middle of the four quadrants, row by row."""
    width, height = image.size
    positions = [(x * width // 4, y * height // 4) for y in (1, 3) for x in (1, 3)]
    return [tuple(np.asarray(image)[y, x].tolist()) for x, y in positions]


def assert_seen(image: Image.Image, expected: list[tuple[int, int, int]], tolerance: int = 0) -> None:
    assert image.mode == "RGB"
    np.testing.assert_allclose(seen(image), expected, atol=tolerance)


def photo(size: tuple[int, int] = (61, 47)) -> Image.Image:
    """Return a smooth image with some texture, like a photograph."""
    x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    noise = np.random.default_rng(0).normal(0, 12, (size[1], size[0], 3))
    waves = np.stack([np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)], axis=-1)
    return Image.fromarray(np.clip(128 + 80 * waves + noise, 0, 255).astype(np.uint8))


def icc_profile(name: str, gamma: float, primaries: tuple[tuple[float, ...], ...] = ()) -> bytes:
    """Return a color profile: RGB if there are three primaries (XYZ under D50), otherwise gray."""

    def xyz(x: float, y: float, z: float) -> bytes:
        return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(65536 * v) for v in (x, y, z)))

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(256 * gamma))
    description = b"desc\0\0\0\0" + struct.pack(">I", len(name) + 1) + name.encode() + bytes(79)
    tags = {b"desc": description, b"cprt": b"text\0\0\0\0-\0", b"wtpt": xyz(0.9642, 1, 0.8249)}
    for letter, primary in zip("rgb", primaries, strict=False):
        tags |= {f"{letter}XYZ".encode(): xyz(*primary), f"{letter}TRC".encode(): curve}
    if not primaries:
        tags[b"kTRC"] = curve
    table, body, start = b"", b"", 132 + 12 * len(tags)
    for tag, content in tags.items():
        table += tag + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    header = struct.pack(">II", start + len(body), 0) + struct.pack(">I", 0x02400000) + b"mntr"
    header += (b"RGB " if primaries else b"GRAY") + b"XYZ " + bytes(12) + b"acsp" + bytes(28)
    return (
        header.ljust(68, b"\0")
        + xyz(0.9642, 1, 0.8249)[8:]
        + bytes(48)
        + struct.pack(">I", len(tags))
        + table
        + body
    )


ADOBE_RGB = icc_profile(
    "Adobe RGB (1998)",
    563 / 256,
    ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)),
)
LINEAR_GREY = icc_profile("Linear grey", 1.0)
