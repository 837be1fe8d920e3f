"""Every kind of file comes out as the colours a person sees, upright and whole, or not at all."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, TiffImagePlugin

import covpool
from covpool.data import decode as decoding
from covpool.data.decode import BadImageError, decode
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
# Pillow's own weights of red, green and blue.
GREYS = [(v, v, v) for v in (76, 150, 29, 255)]


def grey16(big: bool = False) -> Image.Image:
    """The corners in grey of 16 bits."""
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
        pytest.param(encode(corners().convert("L").convert("I"), "TIFF"), 255, id="tiff of 32 bits"),
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
    # Pillow turns 8 bits when it writes them, and back when it reads them; 16 bits it leaves alone.
    assert_seen(decode(encode(corners().convert("L"), "TIFF", tiffinfo=white_is_zero)), GREYS)
    negative = [(255 - r, 255 - g, 255 - b) for r, g, b in GREYS]
    assert_seen(decode(encode(grey16(), "TIFF", tiffinfo=white_is_zero)), negative)


def test_colours_of_16_bits_lose_the_lower_8() -> None:
    # Pillow cannot write them. Four pixels of PNG by hand: filter 0, then 6 bytes each.
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
    alpha.paste(0, (0, 0, 12, 8))  # the red corner is not seen at all, the green one by half
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
    # What a camera stores that was held as the number says, so that the corners are seen.
    method = decoding.UPRIGHT.get(orientation)
    turned_back = {Image.Transpose.ROTATE_90: 4, Image.Transpose.ROTATE_270: 2}
    stored = corners() if method is None else corners().transpose(turned_back.get(method, method))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = (
        {"lossless": True} if image_format == "WEBP" else {"quality": 95} if image_format == "JPEG" else {}
    )
    image = decode(encode(stored, image_format, exif=exif, **options))
    assert image.size == (24, 16)
    assert_seen(image, COLOURS, tolerance=3)
    assert decode(encode(image, "PNG")).size == (24, 16), "it would be turned a second time"


def test_broken_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(corners(), "PNG", exif=exif)
    assert decode(data).size == (16, 24)
    broken = data.replace(exif.tobytes()[6:14], b"nonsense")
    assert broken != data
    # Another checksum would have Pillow refuse it; without one to fail, the metadata is all that is wrong.
    start = broken.index(b"eXIf")
    length = int.from_bytes(broken[start - 4 : start], "big")
    crc = zlib.crc32(broken[start : start + 4 + length]).to_bytes(4, "big")
    broken = broken[: start + 4 + length] + crc + broken[start + 8 + length :]
    assert_seen(decode(broken), COLOURS)


def test_colour_profiles() -> None:
    # The greenest green of Adobe RGB is greener than sRGB can be; a dull orange is livelier than its numbers.
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


@contextmanager
def loading_truncated(value: bool = True) -> Iterator[None]:
    """Pillow as it is after a library told it to load what it can."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = value
    try:
        yield
        assert ImageFile.LOAD_TRUNCATED_IMAGES is value, "it is not ours to change"
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def attempt(data: bytes) -> Image.Image | BadImageError:
    try:
        return decode(data)
    except BadImageError as error:
        return error


FILES = {
    "jpeg": encode(photo(), "JPEG"),
    "progressive": encode(photo(), "JPEG", progressive=True),
    "with a preview": encode(photo(), "JPEG", exif=b"Exif\0\0" + encode(photo((16, 16)), "JPEG")),
    "png": encode(photo(), "PNG"),
    "gif": encode(photo(), "GIF"),
    "two pictures": encode(photo(), "GIF", save_all=True, append_images=[photo().rotate(90)]),
    "webp": encode(photo(), "WEBP"),
    "bmp": encode(photo(), "BMP"),
    "tiff": encode(photo(), "TIFF"),
    "tiff, lzw": encode(photo(), "TIFF", compression="tiff_lzw"),
    "ppm": encode(photo(), "PPM"),
}


@pytest.mark.filterwarnings("ignore:Truncated File Read:UserWarning", "ignore:Corrupt EXIF:UserWarning")
@pytest.mark.parametrize("loads_truncated", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_no_part_of_a_picture(name: str, loads_truncated: bool) -> None:
    data = FILES[name]
    whole, reasons = decode(data).tobytes(), []
    lengths = [*range(0, len(data), 1 + len(data) // 80), *range(len(data) - 40, len(data))]
    for length in lengths:
        with loading_truncated(loads_truncated):
            part = attempt(data[:length])
        assert isinstance(part, BadImageError) or part.tobytes() == whole, f"{length} of {len(data)} bytes"
        # So little that it is no image yet is another matter.
        if isinstance(part, BadImageError) and length >= 100:
            reasons.append(part.reason)
    assert set(reasons) == {"truncated"}
    assert len(reasons) > (0.3 if name == "two pictures" else 0.7) * len(lengths)


def test_damage_is_not_truncation() -> None:
    data = FILES["progressive"]
    table = data.rindex(b"\xff\xc4")  # of codes, for the last pass over the picture
    damaged = data[: table + 4] + b"\xff" + data[table + 5 :]
    for loads_truncated in (False, True):
        with (
            loading_truncated(loads_truncated),
            pytest.raises(BadImageError, match="the JPEG is bro") as caught,
        ):
            decode(damaged)
        assert caught.value.reason == "unreadable"


@needs_sparrows
@settings(deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), loads_truncated=st.booleans())
def test_no_part_of_a_photograph(share: float, loads_truncated: bool) -> None:
    data = min((SPARROWS / "train").rglob("*.jpg")).read_bytes()
    cut = data[: int(share * len(data))]
    # Of a file that was allocated and never written to its end, the last bytes are zeros. The very last code
    # of a JPEG may be one of zeros, too, so those are left out here.
    filled = cut[: int(0.99 * len(data))].ljust(len(data), b"\0")
    for truncated in (cut, filled):
        with loading_truncated(loads_truncated), pytest.raises(BadImageError):
            decode(truncated)


@settings(deadline=None)
@given(data=st.data())
def test_damage_is_an_error_or_a_picture(data: st.DataObject) -> None:
    file = bytearray(
        FILES[data.draw(st.sampled_from(["jpeg", "progressive", "png", "gif", "webp", "bmp", "ppm"]))]
    )
    for _ in range(data.draw(st.integers(1, 20))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    result = attempt(bytes(file))
    with loading_truncated():
        again = attempt(bytes(file))
    if isinstance(result, BadImageError):
        assert str(result)
        assert "\n" not in str(result)
        assert " 0x" not in str(result), "an address, another in every run"
        assert isinstance(again, BadImageError), "Pillow was told to let it pass"
    else:
        assert result.mode == "RGB"
        assert isinstance(again, BadImageError) or again.tobytes() == result.tobytes()


@pytest.mark.parametrize("times", [1.5, 3], ids=["Pillow warns", "Pillow raises"])
@pytest.mark.parametrize("warned", ["error", "ignore"])
def test_bombs(times: float, warned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 24 * 16
    bomb = encode(Image.new("RGB", (24, round(16 * times))), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    assert decode(encode(corners(), "PNG")).size == (24, 16)
    with warnings.catch_warnings():
        warnings.simplefilter(warned)  # type: ignore[arg-type]
        with pytest.raises(BadImageError, match="pixels") as caught:
            decode(bomb)
    assert caught.value.reason == "too large"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode(bomb).height == round(16 * times)


def test_pillows_limit_is_as_it_was() -> None:
    # 20,000 × 20,000 pixels of one colour are 49 kB of PNG.
    side = 20_000
    header = encode(Image.new("1", (1, 1)), "PNG")
    bomb = bytearray(header)
    bomb[16:24] = side.to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(BadImageError) as caught:
        decode(bytes(bomb))
    assert caught.value.reason == "too large"


@pytest.mark.parametrize(
    ("data", "reason", "sentence"),
    [
        (b"", "unreadable", "the file is empty"),
        (
            bytes(1000),
            "unreadable",
            r"it is no known kind of image: it begins with b'\x00\x00\x00\x00\x00\x00\x00\x00'",
        ),
        (b"hello", "unreadable", "it is no known kind of image: it begins with b'hello'"),
        (b"<!DOCTYPE html><html>404", "format", "it is a web page; what is read is JPEG, PNG, "),
        (b"\0\0\0\x20ftypavif" + bytes(20), "format", "it is AVIF; what is read is JPEG, PNG, "),
        (b"\0\0\0\x20ftypheic" + bytes(20), "format", "it is HEIC; what is read is JPEG, PNG, "),
        (b"8BPS\0\1", "format", "it is Photoshop; what is read is JPEG, PNG, "),
        (
            b"\x89PNG\r\n\x1a\n" + bytes(100),
            "unreadable",
            "the PNG is broken: its header makes no sense",
        ),
        (
            encode(Image.new("F", (4, 4), 0.5), "TIFF"),
            "format",
            "its pixels are F, which has no agreed black",
        ),
        (encode(Image.new("I", (4, 4), 1 << 20), "TIFF"), "format", "its pixels have 32 bits, which have no"),
    ],
)
def test_what_is_refused(data: bytes, reason: str, sentence: str) -> None:
    with pytest.raises(BadImageError) as caught:
        decode(data)
    assert caught.value.reason == reason
    assert str(caught.value).startswith(sentence)
    back = pickle.loads(pickle.dumps(caught.value))
    assert (back.reason, str(back)) == (reason, str(caught.value))


def test_other_readers_of_pillow_never_run(tmp_path: Path) -> None:
    icon = encode(corners(), "ICO")
    for data in (icon, encode(corners(), "TGA"), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"):
        with pytest.raises(BadImageError, match="it is "):
            decode(data)
    # In a fresh process, since saving has imported more: the others are not even imported.
    (tmp_path / "image.webp").write_bytes(encode(corners(), "WEBP"))
    script = """
import sys, types
covpool = sys.modules["covpool"] = types.ModuleType("covpool")  # without torch, which takes seconds
covpool.__path__ = [sys.argv[2]]
from covpool.data.decode import decode
decode(open(sys.argv[1], "rb").read())
from PIL import Image
print(*sorted(Image.OPEN))
"""
    package = str(Path(covpool.__file__).parent)
    command = [sys.executable, "-c", script, str(tmp_path / "image.webp"), package]
    readers = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"WEBP"} < set(readers) <= {"BMP", "DIB", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"}


@pytest.mark.parametrize("name", FILES)
def test_whole_pictures_are_the_same_whatever_pillow_was_told(name: str) -> None:
    whole = decode(FILES[name]).tobytes()
    with loading_truncated():
        assert decode(FILES[name]).tobytes() == whole


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
