"""Damaged, truncated, too large or unsupported files raise an error; decoding never returns half an image."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from covpool.data.decode import decode
from covpool.errors import BadImageError
from tests.data.kinds_of_files import FILES
from tests.data.pictures import SPARROWS, corners, encode, needs_sparrows


@contextmanager
def loading_truncated(value: bool = True) -> Iterator[None]:
    """Set the option of Pillow to load truncated images, as other libraries do."""
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
        # Very short parts are not recognized as images, so they have other reasons.
        if isinstance(part, BadImageError) and length >= 100:
            reasons.append(part.reason)
    assert set(reasons) == {"truncated"}
    assert len(reasons) > (0.3 if name == "two pictures" else 0.7) * len(lengths)


def test_a_png_without_its_last_chunk_is_truncated() -> None:
    """All its pixels are there, but the file was cut."""
    part = attempt(encode(corners(), "PNG")[:-12])
    assert isinstance(part, BadImageError)
    assert part.reason == "truncated"


def test_damage_is_not_truncation() -> None:
    data = FILES["progressive"]
    table = data.rindex(b"\xff\xc4")  # the Huffman table of the last scan
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
    # A file that was allocated but not completely written ends in zeros. The last code of a JPEG may be zeros
    # too, so at least 1 % is zeros here.
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
    # A PNG of 20,000 × 20,000 pixels in one color takes 49 kB.
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
            r"it is not a known image format: it starts with b'\x00\x00\x00\x00\x00\x00\x00\x00'",
        ),
        (b"hello", "unreadable", "it is not a known image format: it starts with b'hello'"),
        (b"<!DOCTYPE html><html>404", "format", "it is a web page; covpool reads JPEG, PNG, "),
        (b"\0\0\0\x0cJXL " + bytes(20), "format", "it is JPEG XL; covpool reads JPEG, PNG, "),
        (b"8BPS\0\1", "format", "it is Photoshop; covpool reads JPEG, PNG, "),
        (
            b"\x89PNG\r\n\x1a\n" + bytes(100),
            "unreadable",
            "the PNG is broken: its header is invalid",
        ),
        (
            encode(Image.new("F", (4, 4), 0.5), "TIFF"),
            "format",
            "its pixels are F, which has no defined black",
        ),
        (encode(Image.new("L", (404, 4)), "PNG"), "too large", "it is 404 by 4, a line"),
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
    # Use a new process, because saving imports more readers. Other readers are not even imported.
    (tmp_path / "image.webp").write_bytes(encode(corners(), "WEBP"))
    script = """
import sys
from covpool.data.decode import decode
decode(open(sys.argv[1], "rb").read())
from PIL import Image
print(*sorted(Image.OPEN))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "image.webp")]
    readers = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    usual = {"BMP", "DIB", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"}
    assert {"WEBP"} < set(readers) <= {*usual, "AVIF", "HEIF"}


@pytest.mark.parametrize("name", FILES)
def test_whole_pictures_are_the_same_whatever_pillow_was_told(name: str) -> None:
    whole = decode(FILES[name]).tobytes()
    with loading_truncated():
        assert decode(FILES[name]).tobytes() == whole
