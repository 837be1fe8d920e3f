"""Every image in a folder is either read, or reported with its format and a remedy."""

from __future__ import annotations

import importlib
import io
import logging
import sys
from pathlib import Path

import pytest
from PIL import features

from covpool.cli.main import main
from covpool.data import decode as decoding
from covpool.data.decode import decode
from covpool.data.sources import open_images, open_unlabeled
from covpool.errors import BadImageError
from tests.data.pictures import encode, photo
from tests.data.trees import write
from tests.forked import finish, fork


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Photographs of two classes, and files in unsupported formats with arbitrary content."""
    for number in range(8):
        write(tmp_path / f"birds/{('jay', 'tit')[number % 2]}/{number}.jpg", encode(photo((40, 30)), "JPEG"))
    for name in ("jay/a.NEF", "jay/b.nef", "tit/c.cr3", "tit/d.jxl", "tit/notes.txt"):
        write(tmp_path / "birds" / name, b"anything")
    return tmp_path / "birds"


LEFT_OUT = (
    "4 pictures left out, in formats that are not read: 2 .nef, raw files of a camera: export them as JPEG "
    "or TIFF; 1 .cr3, raw files of a camera: export them as JPEG or TIFF; 1 .jxl, convert them to JPEG or PNG"
)


@pytest.mark.parametrize("opened", [open_images, open_unlabeled])
def test_training_and_prediction_name_what_they_leave_out(
    mixed: Path, opened: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "covpool"):
        assert len(opened(mixed)) == 8  # type: ignore[operator]
    assert [record.getMessage() for record in caplog.records] == [f"{mixed}: {LEFT_OUT}"]


def test_check_finds_them(
    mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mixed.parent)
    assert main(["check", "birds"]) == 1
    assert "not read" in capsys.readouterr().out
    lines = Path("runs/problems.csv").read_text()
    for name in ("jay/a.NEF", "jay/b.nef", "tit/c.cr3", "tit/d.jxl"):
        assert f"{name},not read," in lines
    assert "notes.txt" not in lines


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_avif() -> None:
    picture = photo((40, 30)).convert("RGB")
    assert decode(encode(picture, "AVIF")).size == (40, 30)


def test_heic() -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    data = io.BytesIO()
    pillow_heif.from_pillow(photo((80, 60)).convert("RGB")).save(data, quality=90)
    picture = decode(data.getvalue())
    assert (picture.size, picture.mode) == ((80, 60), "RGB")
    with pytest.raises(BadImageError):
        decode(data.getvalue()[: len(data.getvalue()) // 2])


def test_without_the_library_it_is_named(tmp_path: Path) -> None:
    def forget() -> None:
        sys.modules["pillow_heif"] = None  # type: ignore[assignment]
        without = importlib.reload(decoding)
        assert without.NOT_READ[".heic"] == "pip install 'covpool[heif]' to read them"
        with pytest.raises(Exception, match=r"it is HEIF; .*: pip install 'covpool\[heif\]' to read them"):
            without.decode(b"\0\0\0\x20ftypheic" + bytes(100))

    finish(fork(forget, tmp_path / "log"), tmp_path / "log")
