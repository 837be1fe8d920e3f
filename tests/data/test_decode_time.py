"""Files that are made to decode slowly raise an error at once."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from covpool.data.decode import MAX_SCANS, decode
from covpool.errors import BadImageError
from tests.data.pictures import encode

SECONDS = 2.0


def jpeg_of_scans(scans: int, side: int = 1400) -> bytes:
    """Return a progressive JPEG whose scans after the first are empty, a few bytes each."""
    blocks = ((side + 7) // 8) ** 2

    def segment(marker: int, content: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content

    def scan(first: int, last: int, data: bytes) -> bytes:
        return segment(0xDA, bytes([1, 1, 0, first, last, 0])) + data

    # The code 0 is a run of 16,384 to 32,767 empty blocks, by the 14 bits that follow.
    count = -(-blocks // 32767)
    runs = [blocks * (i + 1) // count - blocks * i // count for i in range(count)]
    bits = "".join(f"0{run - 16384:014b}" for run in runs)
    bits += "1" * (-len(bits) % 8)
    empty = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return b"".join(
        [
            b"\xff\xd8",
            segment(0xDB, b"\0" + bytes([1] * 64)),
            segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0])),
            segment(0xC4, bytes([0x00, 1, *[0] * 15, 0])),
            segment(0xC4, bytes([0x10, 1, 1, *[0] * 14, 0xE0, 0x00])),
            scan(0, 0, bytes((blocks + 7) // 8)),
            *[scan(1, 63, empty)] * (scans - 1),
            b"\xff\xd9",
        ]
    )


def jpeg_of_comments(count: int) -> bytes:
    """Return a JPEG of two scans, with empty comments after them and one that looks like many scans."""
    odd = b"\xff\xfe" + struct.pack(">H", 2 + 2 * (MAX_SCANS + 1)) + b"\xff\xda" * (MAX_SCANS + 1)
    return jpeg_of_scans(2)[:-2] + b"\xff\xfe\0\2" * count + odd + b"\xff\xd9"


def png_of_chunks(count: int, kind: bytes) -> bytes:
    """Return a PNG of 8 by 8 pixels with empty chunks before its pixels."""
    data = encode(Image.new("RGB", (8, 8)), "PNG")
    place = data.index(b"IDAT") - 4
    empty = struct.pack(">I4sI", 0, kind, zlib.crc32(kind))
    return data[:place] + empty * count + data[place:]


def gif_of_blocks(count: int) -> bytes:
    """Return a GIF with a comment in blocks of one byte."""
    data = encode(Image.new("P", (8, 8)), "GIF")
    place = data.index(b"\x2c\0\0\0\0")
    return data[:place] + b"\x21\xfe" + b"\x01x" * count + b"\0" + data[place:]


def tiff_of_overlapping_strips(rows: int = 4000, width: int = 64) -> bytes:
    """Return a TIFF whose rows all are the same strip, which is long and decodes to one row."""
    compressor = zlib.compressobj(0)
    strip = (
        b"\x78\x01" + b"\0\0\0\xff\xff" * 150_000 + compressor.compress(bytes(width))[2:] + compressor.flush()
    )
    entries = [
        (256, 4, 1, width),
        (257, 4, 1, rows),
        (258, 3, 1, 8),
        (259, 3, 1, 8),
        (262, 3, 1, 1),
        (273, 4, rows, 8 + len(strip)),
        (277, 3, 1, 1),
        (278, 4, 1, 1),
        (279, 4, rows, 8 + len(strip) + 4 * rows),
    ]
    tables = struct.pack("<I", 8) * rows + struct.pack("<I", len(strip)) * rows
    start = 8 + len(strip) + len(tables)
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *one) for one in entries)
    return struct.pack("<2sHI", b"II", 42, start) + strip + tables + directory + bytes(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jpeg_of_scans(20_000), "it has more than 100 scans"),
        (lambda: b"P6 #" + b"x" * (8 << 20) + b"\n8 8 255\n" + bytes(192), "too many small pieces"),
        (lambda: b"P6" + b" " * (8 << 20) + b"8 8 255\n" + bytes(192), "too many small pieces"),
        (lambda: png_of_chunks(700_000, b"tEXt"), "too many small pieces"),
        (lambda: png_of_chunks(700_000, b"IDAT"), "too many small pieces"),
        (lambda: gif_of_blocks(4 << 20), "too many small pieces"),
        (
            lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * (2 << 20) + encode(Image.new("L", (8, 8)), "JPEG")[2:],
            "pieces",
        ),
        (lambda: jpeg_of_comments(2 << 20), "pieces"),
        (tiff_of_overlapping_strips, "its strips or tiles have more bytes than the file"),
    ],
    ids=["scans", "comment", "spaces", "texts", "chunks", "blocks", "segments", "comments", "strips"],
)
def test_a_slow_file_is_refused_at_once(make: Callable[[], bytes], message: str) -> None:
    data = make()
    before = time.process_time()
    with pytest.raises(BadImageError, match=message) as caught:
        decode(data)
    assert caught.value.reason == "too large"
    assert time.process_time() - before < SECONDS


def test_honest_files_below_the_limits_are_read() -> None:
    assert decode(jpeg_of_scans(MAX_SCANS)).size == (1400, 1400)
    assert decode(jpeg_of_comments(1000)).size == (1400, 1400)
    assert decode(png_of_chunks(1000, b"tEXt")).size == (8, 8)
    assert decode(gif_of_blocks(1000)).size == (8, 8)


def test_a_video_after_a_jpeg_and_a_thumbnail_in_it_have_no_scans() -> None:
    image = Image.new("RGB", (64, 64), (200, 30, 30))
    comment = b"\xff\xfe\x40\x02" + b"\xff\xda" * 0x2000
    data = encode(image, "JPEG")
    for odd in (data + b"\xff\xda\0\2" * 1000, data[:2] + comment + data[2:]):
        assert decode(odd).tobytes() == decode(data).tobytes()
