"""Every file format is decoded to the colors that a person sees, upright and complete."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from covpool.data.decode import decode
from tests.data.kinds_of_files import FILES
from tests.data.pictures import (
    ADOBE_RGB,
    BLACK,
    BLUE,
    GREEN,
    LINEAR_GREY,
    RED,
    SPARROWS,
    TINY10,
    WHITE,
    assert_seen,
    corners,
    encode,
    icc_profile,
    needs_sparrows,
    needs_tiny10,
    photo,
)

COLOURS = [RED, GREEN, BLUE, WHITE]
# Gray values by Pillow's weights of red, green and blue.
GREYS = [(v, v, v) for v in (76, 150, 29, 255)]


def grey16(big: bool = False) -> Image.Image:
    """Return the corners in 16-bit gray."""
    values = np.asarray(corners().convert("L")).astype(np.uint16) * 257
    return Image.fromarray(values.astype(">u2" if big else "<u2"))


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [
        pytest.param(encode(corners(), "JPEG", quality=95), 3, id="jpeg"),
        pytest.param(encode(corners(), "JPEG", quality=95, progressive=True), 3, id="progressive"),
        pytest.param(encode(corners(), "JPEG", quality=95, keep_rgb=True), 3, id="jpeg of rgb"),
        pytest.param(encode(corners().convert("CMYK"), "JPEG", quality=95), 3, id="jpeg of cmyk"),
        pytest.param(encode(corners(), "PNG"), 0, id="png"),
        pytest.param(encode(corners().quantize(4), "PNG"), 0, id="png with a palette"),
        pytest.param(encode(corners().convert("RGBA"), "PNG"), 0, id="png with alpha"),
        pytest.param(encode(corners(), "WEBP", lossless=True), 0, id="webp"),
        pytest.param(encode(corners(), "WEBP", quality=95), 40, id="lossy webp"),
        pytest.param(encode(corners(), "GIF"), 0, id="gif"),
        pytest.param(encode(corners(), "BMP"), 0, id="bmp"),
        pytest.param(encode(corners().quantize(4), "BMP"), 0, id="bmp with a palette"),
        pytest.param(encode(corners(), "TIFF"), 0, id="tiff"),
        pytest.param(encode(corners(), "TIFF", compression="tiff_lzw"), 0, id="tiff, lzw"),
        pytest.param(encode(corners(), "TIFF", compression="jpeg", quality=95), 60, id="tiff, jpeg"),
        pytest.param(encode(corners().convert("CMYK"), "TIFF"), 0, id="tiff of cmyk"),
        pytest.param(
            encode(corners().convert("YCbCr"), "TIFF", compression="tiff_lzw"), 2, id="tiff of ycbcr"
        ),
        pytest.param(encode(corners().convert("LAB"), "TIFF"), 25, id="tiff of lab"),
        pytest.param(encode(corners().quantize(4), "TIFF"), 0, id="tiff with a palette"),
        pytest.param(encode(corners(), "PPM"), 0, id="ppm"),
    ],
)
def test_colours(data: bytes, tolerance: int) -> None:
    assert_seen(decode(data), COLOURS, tolerance)


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [
        pytest.param(encode(corners().convert("L"), "JPEG", quality=95), 3, id="jpeg"),
        pytest.param(encode(corners().convert("L"), "PNG"), 0, id="png"),
        pytest.param(encode(corners().convert("LA"), "PNG"), 0, id="png with alpha"),
        pytest.param(encode(grey16(), "PNG"), 0, id="png of 16 bits"),
        pytest.param(encode(grey16(), "TIFF"), 0, id="tiff of 16 bits"),
        pytest.param(encode(grey16(big=True), "TIFF"), 0, id="tiff of 16 bits, the upper first"),
        pytest.param(encode(grey16(), "PPM"), 0, id="pgm of 16 bits"),
        pytest.param(encode(grey16().convert("I"), "TIFF"), 0, id="tiff of 32 bits"),
    ],
)
def test_greys(data: bytes, tolerance: int) -> None:
    assert_seen(decode(data), GREYS, tolerance)


def test_a_single_pixel() -> None:
    for image_format in ("PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        options = {"lossless": True} if image_format == "WEBP" else {}
        image = decode(encode(Image.new("RGB", (1, 1), RED), image_format, **options))
        assert np.asarray(image).tolist() == [[[255, 0, 0]]]


def test_two_colours() -> None:
    image = corners().convert("1", dither=Image.Dither.NONE)
    for image_format in ("PNG", "BMP", "TIFF", "PPM"):
        assert_seen(decode(encode(image, image_format)), [BLACK, WHITE, BLACK, WHITE])


def test_tiff_whose_white_is_zero() -> None:
    white_is_zero = TiffImagePlugin.ImageFileDirectory_v2()
    white_is_zero[262] = 0
    # Pillow inverts 8-bit values when it writes and when it reads them. It does not invert 16-bit values.
    assert_seen(decode(encode(corners().convert("L"), "TIFF", tiffinfo=white_is_zero)), GREYS)
    negative = [(255 - r, 255 - g, 255 - b) for r, g, b in GREYS]
    assert_seen(decode(encode(grey16(), "TIFF", tiffinfo=white_is_zero)), negative)


def test_colours_of_16_bits_lose_the_lower_8() -> None:
    # Pillow cannot write them. This is a PNG of two pixels by hand: filter 0, then 6 bytes per pixel.
    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    row = b"\0" + struct.pack(">6H", 0xFFFF, 0, 0x80FF, 0x1234, 0xABCD, 0)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(row))
        + chunk(b"IEND", b"")
    )
    assert np.asarray(decode(data)).tolist() == [[[255, 0, 0x80], [0x12, 0xAB, 0]]]


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "TIFF"])
def test_transparency_is_over_white(image_format: str) -> None:
    image = corners().convert("RGBA")
    alpha = Image.new("L", image.size, 255)
    alpha.paste(0, (0, 0, 12, 8))  # the red corner is transparent, the green one half transparent
    alpha.paste(128, (12, 0, 24, 8))
    image.putalpha(alpha)
    options = {"lossless": True, "exact": True} if image_format == "WEBP" else {}
    data = encode(image, image_format, **options)
    assert Image.open(io.BytesIO(data)).convert("RGB").getpixel((1, 1)) == RED, "nothing was hidden"
    assert_seen(decode(data), [WHITE, (127, 255, 127), BLUE, WHITE])


def test_transparent_colours_and_palettes() -> None:
    grey = corners().convert("L")
    assert_seen(decode(encode(grey, "PNG", transparency=76)), [WHITE, *GREYS[1:]])
    assert_seen(decode(encode(corners(), "PNG", transparency=RED)), [WHITE, *COLOURS[1:]])
    assert_seen(decode(encode(grey16(), "PNG", transparency=76 * 257)), [WHITE, *GREYS[1:]])
    white = corners().convert("1", dither=Image.Dither.NONE)
    assert_seen(decode(encode(white, "PNG", transparency=0)), [WHITE] * 4)
    grey_alpha = Image.merge("LA", (grey, grey.point(lambda v: 0 if v == 76 else 255)))
    assert_seen(decode(encode(grey_alpha, "PNG")), [WHITE, *GREYS[1:]])
    palette = corners().quantize(4)
    red, green = (palette.getpixel(place) for place in ((1, 1), (20, 1)))
    assert isinstance(red, int)
    assert isinstance(green, int)
    for image_format in ("PNG", "GIF"):
        assert_seen(decode(encode(palette, image_format, transparency=red)), [WHITE, *COLOURS[1:]])
    several = bytes(0 if index == red else 128 if index == green else 255 for index in range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode(encode(palette, "PNG", transparency=several))
    assert_seen(image, [WHITE, (127, 255, 127), BLUE, WHITE])


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_upright(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = (
        {"lossless": True} if image_format == "WEBP" else {"quality": 95} if image_format == "JPEG" else {}
    )
    data = encode(corners(), image_format, exif=exif, **options)
    image = decode(data)
    assert image.tobytes() == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).tobytes()
    assert image.size == ((16, 24) if 5 <= orientation <= 8 else (24, 16))
    assert decode(encode(image, "PNG")).size == image.size, "it would be turned a second time"


def test_broken_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(corners(), "PNG", exif=exif)
    assert decode(data).size == (16, 24)
    broken = data.replace(exif.tobytes()[6:14], b"nonsense")
    assert broken != data
    # Update the checksum, or Pillow would refuse the file. Then only the metadata is wrong.
    start = broken.index(b"eXIf")
    length = int.from_bytes(broken[start - 4 : start], "big")
    crc = zlib.crc32(broken[start : start + 4 + length]).to_bytes(4, "big")
    broken = broken[: start + 4 + length] + crc + broken[start + 8 + length :]
    assert_seen(decode(broken), COLOURS)


def test_colour_profiles() -> None:
    # The same values are a more saturated orange in Adobe RGB than in sRGB.
    image = Image.new("RGB", (8, 8), (200, 100, 50))
    for image_format, tolerance in (("PNG", 1), ("TIFF", 1), ("JPEG", 4)):
        data = encode(image, image_format, icc_profile=ADOBE_RGB)
        assert_seen(decode(data), [(227, 100, 42)] * 4, tolerance)
    grey = decode(encode(Image.new("L", (8, 8), 128), "PNG", icc_profile=LINEAR_GREY))
    assert_seen(grey, [(188, 188, 188)] * 4, tolerance=1)
    transparent = decode(encode(Image.new("RGBA", (8, 8), (200, 100, 50, 0)), "PNG", icc_profile=ADOBE_RGB))
    assert_seen(transparent, [WHITE] * 4)
    palette = decode(encode(image.quantize(2), "PNG", icc_profile=ADOBE_RGB))
    assert_seen(palette, [(227, 100, 42)] * 4, tolerance=1)


def test_useless_profiles_are_ignored() -> None:
    named_srgb = icc_profile("sRGB IEC61966-2.1", 1.0, ((1, 0, 0), (0, 1, 0), (0, 0, 1)))
    for profile in (b"nonsense", ADOBE_RGB[:200], LINEAR_GREY, named_srgb):
        assert_seen(decode(encode(corners(), "PNG", icc_profile=profile)), COLOURS)
    assert_seen(decode(encode(corners().convert("CMYK"), "TIFF", icc_profile=ADOBE_RGB)), COLOURS)


def test_the_first_of_several_pictures() -> None:
    others = [Image.new("RGB", (24, 16), BLACK)]
    for image_format in ("GIF", "PNG", "TIFF", "WEBP"):
        options = {"lossless": True} if image_format == "WEBP" else {}
        data = encode(corners(), image_format, save_all=True, append_images=others, **options)
        assert_seen(decode(data), COLOURS)
    stereo = encode(corners(), "MPO", save_all=True, append_images=others, quality=95)
    assert Image.open(io.BytesIO(stereo)).format == "MPO"
    assert_seen(decode(stereo), COLOURS, tolerance=3)


def test_nothing_of_the_file_is_left() -> None:
    image = decode(encode(corners(), "PNG", icc_profile=ADOBE_RGB, dpi=(300, 300)))
    assert image.info == {}
    assert pickle.loads(pickle.dumps(image)).tobytes() == image.tobytes()


def test_threads() -> None:
    names = [*FILES, "profile"] * 8
    files = FILES | {"profile": encode(photo(), "PNG", icc_profile=ADOBE_RGB)}
    alone = {name: decode(data).tobytes() for name, data in files.items()}
    with ThreadPoolExecutor(8) as pool:
        for name, pixels in zip(names, pool.map(lambda n: decode(files[n]).tobytes(), names), strict=True):
            assert pixels == alone[name], name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process(tmp_path: Path) -> None:
    data = encode(photo(), "PNG", icc_profile=ADOBE_RGB)
    before = decode(data).tobytes()
    child = os.fork()
    if not child:
        (tmp_path / "pixels").write_bytes(decode(data).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "pixels").read_bytes() == before


@needs_sparrows
@needs_tiny10
def test_real_photographs_are_what_pillow_makes_of_them() -> None:
    paths = sorted(SPARROWS.rglob("*.jpg"))[::40] + sorted(TINY10.rglob("*.JPEG"))[::11]
    assert len(paths) > 500
    modes = set()
    for path in paths:
        with Image.open(path) as image:
            modes.add(image.mode)
            assert decode(path.read_bytes()).tobytes() == image.convert("RGB").tobytes()
    assert modes == {"L", "RGB"}
