"""Tables of paths and labels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from covpool.data.sources import layout_of, open_images, splits
from covpool.storage.remote import trust_rows
from tests.data.sources.test_folder import content
from tests.data.trees import plant


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return plant(tmp_path, "set/1.jpg", "set/2.jpg", "set/a b/3.jpg", "elsewhere/4.jpg")


def table(folder: Path, text: str, name: str = "labels.csv", encoding: str = "utf-8") -> Path:
    path = folder / "set" / name
    path.write_bytes(text.encode(encoding))
    return path


def test_paths_and_labels(folder: Path) -> None:
    path = table(
        folder, f"path,label\n2.jpg,wren\n1.jpg,jay\n../elsewhere/4.jpg,jay\n{folder}/set/a b/3.jpg,wren\n"
    )
    assert layout_of(path) == "csv"
    with trust_rows():  # one file is in another folder
        assert splits(path) == ("train",)
        images = open_images(path)
    assert images.classes == ("jay", "wren")
    assert content(images) == [
        ("2.jpg", "wren"),
        ("1.jpg", "jay"),
        ("../elsewhere/4.jpg", "jay"),
        (f"{folder}/set/a b/3.jpg", "wren"),
    ]
    assert [images.read(i) for i in range(4)] == [
        (folder / name).read_bytes()
        for name in ("set/2.jpg", "set/1.jpg", "elsewhere/4.jpg", "set/a b/3.jpg")
    ]


def test_splits(folder: Path) -> None:
    path = table(folder, "label,path,split,note\na,1.jpg,train,x\na,2.jpg,valid,\nb,a b/3.jpg,Train,\n")
    assert splits(path) == ("train", "val")
    assert content(open_images(path)) == [("1.jpg", "a"), ("a b/3.jpg", "b")]
    assert content(open_images(path, "val")) == [("2.jpg", "a")]


def test_labels_that_are_numbers_are_in_their_order(folder: Path) -> None:
    assert open_images(table(folder, "path,label\n1.jpg,10\n2.jpg,9\na b/3.jpg,-1")).classes == (
        "-1",
        "9",
        "10",
    )
    assert open_images(table(folder, "path,label\n1.jpg,10\n2.jpg,9\na b/3.jpg,x")).classes == (
        "10",
        "9",
        "x",
    )
    assert open_images(table(folder, "path,label\n1.jpg,²\n2.jpg,9")).classes == ("9", "²")


@pytest.mark.parametrize(
    ("text", "name", "encoding"),
    [
        ("Path;Label\r\n1.jpg;b, c\r\n\r\na b/3.jpg;a\r\n", "labels.csv", "utf-8-sig"),
        ("path\tlabel\n1.jpg\tb, c\na b/3.jpg\ta\n", "labels.tsv", "utf-8"),
        ('path , label\n"1.jpg","b, c"\n"a b/3.jpg",a', "labels.CSV", "utf-8"),
    ],
)
def test_as_spreadsheets_write_them(text: str, name: str, encoding: str, folder: Path) -> None:
    path = table(folder, text, name, encoding)
    assert content(open_images(path)) == [("1.jpg", "b, c"), ("a b/3.jpg", "a")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no column 'path': its first line should be path,label or path,label,split; it is ''"),
        ("1.jpg,jay\n2.jpg,wren\n", "has no column 'path': its first line should be .*; it is '1.jpg,jay'"),
        ("path,class\n1.jpg,jay\n", "has no column 'label': its first line should be .*; it is 'path,class'"),
        ("path,label\n", "has no images"),
        ("path,label\n1.jpg,jay\n2.jpg\n", "has 1 of 2 columns in row 3"),
        ("path,label\n1.jpg,jay\n2.jpg,\n", "has no label in row 3"),
        ("path,label\n,jay\n", "has no path in row 2"),
        ("path,label,split\n1.jpg,jay,rest\n", "has the split 'rest' in row 2; use one of train, val, test"),
        (
            "path,label,split\n1.jpg,jay,train\n2.jpg,wren,test\n",
            "has no training images of 1 of its 2 classes, first of 'wren'",
        ),
        (
            "path,label\n1.jpg,jay\n7.jpg,jay\n2.jpg,jay\n8.jpg,jay\n",
            "lists files that are missing: 2 of 4, first 7.jpg$",
        ),
        ("path,label\n" + "x" * 200_000 + ",jay\n", "is no CSV: field larger than field limit"),
    ],
)
def test_mistakes(text: str, sentence: str, folder: Path) -> None:
    path = table(folder, text)
    with pytest.raises(ValueError, match=f"^{path} {sentence}"):
        open_images(path)


def test_not_in_utf_8(folder: Path) -> None:
    path = table(folder, "path,label\n1.jpg,Grünspecht\n", encoding="latin-1")
    with pytest.raises(ValueError, match="is not in UTF-8: save it as 'CSV UTF-8'"):
        open_images(path)


def test_from_any_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(folder, "path,label\n1.jpg,jay\n")
    monkeypatch.chdir(folder)
    images = open_images(Path("set", "labels.csv"))
    assert images.read(0) == (folder / "set" / "1.jpg").read_bytes()
    assert os.getcwd() == str(folder)


def test_a_link_does_not_lead_a_labeled_row_out_of_the_folder(folder: Path) -> None:
    (folder / "set" / "link.jpg").symlink_to(folder / "elsewhere" / "4.jpg")
    (folder / "set" / "away").symlink_to(folder / "elsewhere")
    (folder / "set" / "near.jpg").symlink_to(folder / "set" / "1.jpg")
    path = table(folder, "path,label\nnear.jpg,jay\nlink.jpg,jay\naway/4.jpg,jay\n")
    images = open_images(path)
    assert images.read(0) == (folder / "set" / "1.jpg").read_bytes()
    for place in (1, 2):
        with pytest.raises(OSError, match="it is a link out of"):
            images.read(place)
    with trust_rows():
        images = open_images(path)
    assert images.read(1) == images.read(2) == (folder / "elsewhere" / "4.jpg").read_bytes()
