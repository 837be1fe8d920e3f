"""Every kind of problem is found, named and explained, and no file is changed."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from covpool.data import look as collection
from covpool.data.check import REMEDIES, Report, check
from covpool.data.look import Collection, groups_of_equals, look
from covpool.data.sources import open_images, splits
from covpool.storage import address
from tests.data.pictures import RED, SPARROWS, corners, encode, jpeg, needs_sparrows, photo
from tests.data.sources.test_benchmarks import make_cub
from tests.data.trees import digests, plant, write

not_as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root ignores file permissions"
)


def found(report: Report) -> set[tuple[str, str]]:
    return {(problem.path, problem.problem) for problem in report.problems}


def details(report: Report, problem: str) -> list[str]:
    return [line.detail for line in report.problems if line.problem == problem]


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """A dataset with every kind of problem except too large files, and some good images."""
    root = plant(
        tmp_path / "set", *(f"{s}/{c}/{i}.jpg" for s in ("train", "test") for c in "ab" for i in (1, 2))
    )
    good = encode(photo(), "JPEG")
    write(root / "train/a/cut.jpg", good[: len(good) // 2])
    write(root / "train/a/empty.jpg", b"")
    write(root / "train/a/page.jpg", b"<!DOCTYPE html><html>404 not found</html>")
    write(root / "train/a/phone.jpg", b"\0\0\0\x0cJXL " + bytes(100))
    write(root / "train/a/really.jpg", encode(corners(), "PNG"))
    write(root / "train/b/again.jpg", (root / "train/b/1.jpg").read_bytes())
    write(root / "train/b/from_a.jpg", (root / "train/a/1.jpg").read_bytes())
    write(root / "test/b/seen.jpg", (root / "train/b/2.jpg").read_bytes())
    write(root / "train/single/1.jpg", jpeg((9, 9, 200)))
    (root / "train/none").mkdir()
    write(root / "train/loose.jpg", jpeg((9, 200, 9)))
    write(root / "train/a/no_extension", encode(corners(), "WEBP"))
    write(root / "train/a/apple.jxl", b"\0\0\0\x0cJXL " + bytes(100))
    write(root / "train/a/camera.NEF", encode(corners(), "TIFF"))
    write(root / "train/a/notes.txt", b"nothing")
    write(root / "train/a/index.html", b"<html></html>")
    (root / "train/a/gone.jpg").symlink_to(root / "nowhere.jpg")
    (root / "train/a/itself.jpg").symlink_to("itself.jpg")
    microscope = np.linspace(0, 0xFFF, 64).reshape(8, 8).astype(np.uint16)  # 12 of 16 bits
    write(root / "train/a/dark.png", encode(Image.fromarray(microscope), "PNG"))
    return root


EXPECTED = {
    ("train/a/cut.jpg", "truncated"),
    ("train/a/empty.jpg", "unreadable"),
    ("train/a/page.jpg", "format"),
    ("train/a/phone.jpg", "format"),
    ("train/a/really.jpg", "extension"),
    ("train/b/again.jpg", "duplicate"),
    ("train/b/from_a.jpg", "two labels"),
    ("test/b/seen.jpg", "leak"),
    ("train/single", "single image"),
    ("test/single", "empty class"),
    ("train/none", "empty class"),
    ("test/none", "empty class"),
    ("train/loose.jpg", "no class"),
    ("train/a/no_extension", "not read"),
    ("train/a/apple.jxl", "not read"),
    ("train/a/camera.NEF", "not read"),
    ("train/a/gone.jpg", "missing"),
    ("train/a/itself.jpg", "unreadable"),
    ("train/a/dark.png", "black"),
}


@pytest.mark.parametrize("workers", [1, 3, None])
def test_every_kind(messy: Path, workers: int | None) -> None:
    report = check(messy, workers=workers)
    assert found(report) == EXPECTED
    assert len(report.problems) == len(EXPECTED)
    assert (report.layout, report.images, report.classes) == ("folder", {"train": 15, "test": 5}, 4)
    of_tables = ("too large", "too slow", "listed twice")
    assert list(report.counts) == [problem for problem in REMEDIES if problem not in of_tables]
    assert report.counts["empty class"] == 3
    assert all(line.detail and "\n" not in line.detail for line in report.problems)
    assert details(report, "leak") == ["it has the bytes of train/b/2.jpg"]
    assert details(report, "two labels") == ["it has the bytes of train/a/1.jpg"]
    assert details(report, "black") == ["its brightest value is 15 of 255"]
    assert details(report, "extension") == ["it is PNG: rename it to end in .png"]
    assert details(report, "not read") == [
        ".jxl is not read: convert them to JPEG or PNG",
        ".nef is not read: raw files of a camera: export them as JPEG or TIFF",
        "it is WEBP: rename it to end in .webp",
    ]


def test_a_table_that_names_a_file_twice(tmp_path: Path) -> None:
    for name, size in {"one": (64, 48), "two": (80, 60)}.items():
        write(tmp_path / f"{name}.jpg", encode(photo(size), "JPEG"))
    (tmp_path / "list.csv").write_text("path,label\none.jpg,a\none.jpg,a\ntwo.jpg,a\ntwo.jpg,b\n")
    report = check(tmp_path / "list.csv")
    assert {line.problem for line in report.problems} >= {"listed twice", "two labels"}
    assert details(report, "listed twice") == ["another row names it, as a"]
    assert details(report, "two labels") == ["another row names it, as a"]


def test_files_are_not_changed(messy: Path) -> None:
    before = digests(messy)
    check(messy)
    assert digests(messy) == before


@not_as_root
def test_a_folder_that_cannot_be_written_to(messy: Path) -> None:
    folders = [path for path in [messy, *messy.rglob("*")] if path.is_dir()]
    try:
        for path in folders:
            path.chmod(0o555)
        assert found(check(messy)) == EXPECTED
    finally:
        for path in folders:
            path.chmod(0o755)


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "a/1.jpg", "a/2.jpg")
    write(tmp_path / "a/bomb.png", encode(Image.new("RGB", (40, 40)), "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    report = check(tmp_path)
    assert found(report) == {("a/bomb.png", "too large")}
    assert details(report, "too large") == ["it has 1,600 pixels, and Pillow's limit is 1,000"]


def test_a_file_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "a/1.jpg", "a/2.jpg")
    write(tmp_path / "a/3.jpg", jpeg(RED) + bytes(5000))
    monkeypatch.setattr(address, "MAX_FILE_BYTES", 5000)
    assert found(check(tmp_path)) == {("a/3.jpg", "too large")}


@not_as_root
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg", "a/2.jpg")
    (tmp_path / "a/1.jpg").chmod(0)
    assert found(check(tmp_path)) == {("a/1.jpg", "unreadable")}


def test_equal_pixels_in_other_bytes(tmp_path: Path) -> None:
    image = photo()
    exif = Image.Exif()
    exif[0x010F] = "A camera"
    write(tmp_path / "train/a/1.png", encode(image, "PNG"))
    write(tmp_path / "train/a/2.bmp", encode(image, "BMP"))
    write(tmp_path / "train/a/3.png", encode(image, "PNG", exif=exif, compress_level=1))
    write(tmp_path / "train/a/4.png", encode(image, "PNG", exif=exif, compress_level=1))
    write(tmp_path / "test/a/5.webp", encode(image, "WEBP", lossless=True))
    # Almost equal: one pixel differs, outside the samples compared first, or the shape differs.
    other = image.copy()
    other.putpixel((1, 0), (0, 0, 0))
    write(tmp_path / "train/a/6.png", encode(other, "PNG"))
    write(tmp_path / "train/a/7.png", encode(image.crop((0, 0, 60, 47)), "PNG"))
    report = check(tmp_path)
    assert found(report) == {
        ("train/a/2.bmp", "duplicate"),
        ("train/a/3.png", "duplicate"),
        ("train/a/4.png", "duplicate"),
        ("test/a/5.webp", "leak"),
    }
    assert set(details(report, "duplicate")) == {"it has the pixels of train/a/1.png"}


def test_the_few_pixels_compared_first_do_not_decide(tmp_path: Path) -> None:
    """The test above relies on this."""
    image = photo()
    other = image.copy()
    other.putpixel((1, 0), (0, 0, 0))
    write(tmp_path / "a/1.png", encode(image, "PNG"))
    write(tmp_path / "a/2.png", encode(other, "PNG"))
    images = open_images(tmp_path)
    assert look(images, 0).samples == look(images, 1).samples
    assert not check(tmp_path).problems


def test_many_copies(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/a", "test/a"):
        for i in range(3):
            write(tmp_path / name / f"{i}.jpg", jpeg(RED))
    report = check(tmp_path)
    assert report.counts == {"leak": 6, "two labels": 3, "duplicate": 2, "empty class": 2}
    assert set(details(report, "two labels")) == {"it has the bytes of train/a/0.jpg"}
    assert set(details(report, "leak")) == {"it has the bytes of train/a/0.jpg"}


def test_equals_are_found() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (6, 16), dtype=np.uint8)
    which = [0, 1, 2, 1, 3, 0, 1, 4, 5]
    groups = sorted(group.tolist() for group in groups_of_equals(rows[which]))
    assert groups == [[0, 5], [1, 3, 6]]
    assert not list(groups_of_equals(rows))
    assert not list(groups_of_equals(rows[:0]))


def test_a_table_with_missing_files_and_an_unknown_label(tmp_path: Path) -> None:
    plant(tmp_path, "1.jpg", "2.jpg", "3.jpg")
    lines = [
        "path,label,split",
        "1.jpg,a,train",
        "2.jpg,a,train",
        "none.jpg,a,train",
        "3.jpg,b,test",
        "1.jpg,a,test",
    ]
    write(tmp_path / "table.csv", "\n".join(lines).encode())
    report = check(tmp_path / "table.csv")
    assert report.layout == "csv"
    assert found(report) == {
        ("none.jpg", "missing"),
        ("1.jpg", "leak"),
        ("train/b", "empty class"),
    }


def test_a_benchmark(tmp_path: Path) -> None:
    make_cub(tmp_path)
    write(tmp_path / "images/002.Auklet/B_2.jpg", (tmp_path / "images/001.Albatross/A_2.jpg").read_bytes())
    report = check(tmp_path)
    assert report.layout == "cub"
    assert report.counts == {"leak": 1, "single image": 2}
    assert ("images/002.Auklet/B_2.jpg", "leak") in found(report)


def test_shards(tmp_path: Path) -> None:
    writing = pytest.importorskip("covpool.data.shards.write")
    root = plant(
        tmp_path / "set", *(f"{s}/{c}/{i}.jpg" for s in ("train", "test") for c in "ab" for i in range(9))
    )
    write(root / "train/a/0.jpg", jpeg(RED)[:300])
    write(root / "test/b/0.jpg", (root / "train/b/3.jpg").read_bytes())
    for split in splits(root):
        writing.write_shards(open_images(root, split), tmp_path / "shards" / split, shard_bytes=4000)
    before = digests(tmp_path / "shards")
    report = check(tmp_path / "shards", workers=4)
    assert report.layout == "shards"
    assert report.images == {"train": 18, "test": 18}
    assert found(report) == {("train/a/0.jpg", "truncated"), ("test/b/0.jpg", "leak")}
    assert digests(tmp_path / "shards") == before


class OneReader:
    """A dataset that records how many threads read it at once."""

    classes = ("a",)

    def __init__(self) -> None:
        self.labels = np.zeros(40, dtype=np.int32)
        self.inside = self.most = 0

    def __len__(self) -> int:
        return 40

    def name(self, i: int) -> str:
        return self.read(i).decode()

    def read(self, i: int) -> bytes:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.001)
        self.inside -= 1
        return b"nothing"


def test_sets_that_are_no_files_are_read_by_one_thread_at_a_time() -> None:
    images = OneReader()
    problems = list(Collection({"train": images}).look_at_all(8, None))
    assert len(problems) == 40
    assert images.most == 1


def test_progress(messy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "IMAGES_AT_ONCE", 4)
    calls: list[tuple[int, int]] = []
    check(messy, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 20) for done in (4, 8, 12, 16, 20)]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check(tmp_path / "none")
    with pytest.raises(ValueError, match="has no folders of classes"):
        check(tmp_path)
    plant(tmp_path, "a/notes.txt")
    with pytest.raises(ValueError, match="has no images"):
        check(tmp_path)
    plant(tmp_path, "a/1.jpg")
    with pytest.raises(ValueError, match="workers must be at least 1; got 0"):
        check(tmp_path, workers=0)


def test_warnings_of_pillow_are_not_passed_on(tmp_path: Path) -> None:
    # A tag claims more bytes than there are.
    exif = bytearray(b"Exif\0\0II*\0\x08\0\0\0\x01\0\x0f\x01\x02\0\xff\xff\0\0\x1a\0\0\0\0\0\0\0")
    data = encode(photo(), "JPEG", exif=bytes(exif))
    with pytest.warns(UserWarning, match="larger than file|Truncated File|orrupt EXIF"):
        Image.open(io.BytesIO(data)).getexif()
    write(tmp_path / "a/1.jpg", data)
    plant(tmp_path, "a/2.jpg")
    assert not check(tmp_path).problems  # warnings are errors in these tests


def test_an_error_in_a_thread_is_raised_and_the_rest_is_not_looked_at(
    messy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def fail(images: object, i: int, lock: object) -> object:
        looked.append(i)
        if len(looked) > 1:
            time.sleep(0.5)  # meanwhile the error of the first image is raised
        raise MemoryError

    monkeypatch.setattr(collection, "look", fail)
    monkeypatch.setattr(collection, "IMAGES_AT_ONCE", 1)
    before = set(threading.enumerate())  # object storage used by another test may keep one
    with pytest.raises(MemoryError):
        check(messy, workers=1)
    assert len(looked) <= 2  # the third image was waiting and is not read
    assert set(threading.enumerate()) <= before


@needs_sparrows
def test_sparrows() -> None:
    report = check(SPARROWS)
    assert not report.problems
    assert report.images == {"train": 629, "test": 615}
