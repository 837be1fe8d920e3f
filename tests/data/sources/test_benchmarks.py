"""The fine-grained benchmarks, as small copies of the files that their authors publish."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from covpool.data.sources import layout_of, open_images, open_unlabeled, splits
from covpool.errors import UsageError
from tests.data.sources.test_folder import content
from tests.data.trees import plant, write


def make_cub(root: Path) -> Path:
    names = ["001.Albatross/A_1.jpg", "001.Albatross/A_2.jpg", "002.Auklet/B 1.jpg", "002.Auklet/B_2.jpg"]
    plant(root / "images", *names)
    texts = {
        "classes.txt": ["001.Albatross", "002.Auklet"],
        "images.txt": names,
        "image_class_labels.txt": ["1", "1", "2", "2"],
        "train_test_split.txt": ["0", "1", "1", "0"],
    }
    for name, values in texts.items():
        lines = (f"{number} {value}\n" for number, value in enumerate(values, start=1))
        write(root / name, "".join(lines).encode())
    return root


def make_aircraft(root: Path) -> Path:
    data = root / "data"
    lists = {
        "train": ["1000001 707-320", "1000002 F/A-18", "1000003 Boeing 717"],
        "val": ["1000004 Boeing 717"],
        "test": ["1000005 F/A-18"],
    }
    write(data / "variants.txt", b"707-320\nBoeing 717\nF/A-18\n")
    for split, lines in lists.items():
        write(data / f"images_variant_{split}.txt", "".join(f"{line}\n" for line in lines).encode())
    plant(data / "images", *(f"100000{i}.jpg" for i in range(1, 6)))
    return root


def make_cars(root: Path) -> Path:
    def annotations(rows: list[tuple[int, str]]) -> dict[str, np.ndarray]:
        kind = [("bbox_x1", "O"), ("class", "O"), ("fname", "O")]
        return {"annotations": np.array([(1, number, name) for number, name in rows], dtype=kind)}

    plant(root, "cars_train/00001.jpg", "cars_train/00002.jpg", "cars_test/00001.jpg", "cars_test/00002.jpg")
    (root / "devkit").mkdir()
    classes = np.array(["AM General Hummer", "Acura RL"], dtype=object)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": classes})
    savemat(root / "devkit" / "cars_train_annos.mat", annotations([(2, "00001.jpg"), (1, "00002.jpg")]))
    savemat(root / "cars_test_annos_withlabels.mat", annotations([(1, "00001.jpg"), (2, "00002.jpg")]))
    return root


@pytest.mark.parametrize("path", ["CUB_200_2011", "."])
def test_cub(path: str, tmp_path: Path) -> None:
    make_cub(tmp_path / "CUB_200_2011")
    path = tmp_path / path
    assert layout_of(path) == "cub"
    assert splits(path) == ("train", "test")
    train = open_images(path)
    assert train.classes == ("001.Albatross", "002.Auklet")
    assert content(train) == [
        ("images/001.Albatross/A_2.jpg", "001.Albatross"),
        ("images/002.Auklet/B 1.jpg", "002.Auklet"),
    ]
    test = open_images(path, "test")
    assert [test.name(i) for i in range(2)] == ["images/001.Albatross/A_1.jpg", "images/002.Auklet/B_2.jpg"]
    assert test.read(1) == (tmp_path / "CUB_200_2011" / test.name(1)).read_bytes()
    by_class = open_images(tmp_path / "CUB_200_2011" / "images")
    assert by_class.classes == train.classes
    assert len(by_class) == 4


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("images.txt", "1 a.jpg\n5 b.jpg\n", "labels.txt has no class of classes.txt for image 5, b.jpg"),
        (
            "train_test_split.txt",
            "1 0\n2 1\n3 maybe\n4 0",
            "has neither 0 nor 1 for image 3, 002.Auklet/B 1.jpg",
        ),
        ("classes.txt", "Albatross\n", "should have a number and a value on each line; one is 'Albatross'"),
        (
            "images.txt",
            "1 a.jpg\n2 b.jpg\n3 c.jpg",
            "lists files that are missing: 3 of 3, first images/b.jpg",
        ),
    ],
)
def test_cub_in_disorder(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    make_cub(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        open_images(tmp_path)


@pytest.mark.parametrize("path", ["fgvc-aircraft-2013b", "."])
def test_aircraft(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_aircraft(tmp_path / "fgvc-aircraft-2013b")
    monkeypatch.chdir(tmp_path)
    assert layout_of(path) == "aircraft"
    assert splits(path) == ("train", "val", "test")
    train = open_images(path)
    assert train.classes == ("707-320", "Boeing 717", "F/A-18")
    folder = "fgvc-aircraft-2013b/data/images"
    assert content(train) == [
        (f"{folder}/1000001.jpg", "707-320"),
        (f"{folder}/1000002.jpg", "F/A-18"),
        (f"{folder}/1000003.jpg", "Boeing 717"),
    ]
    assert [int(label) for label in open_images(path, "train+val").labels] == [0, 2, 1, 1]
    assert open_images(path, "test").read(0) == (tmp_path / folder / "1000005.jpg").read_bytes()
    (tmp_path / folder / "1000004.jpg").unlink()
    with pytest.raises(ValueError, match=r"lists files that are missing: 1 of 5, first .*/1000004\.jpg"):
        open_images(path)


@pytest.mark.parametrize("path", ["stanford_cars", "."])
def test_cars(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cars(tmp_path / "stanford_cars")
    monkeypatch.chdir(tmp_path)
    assert layout_of(path) == "cars"
    assert splits(path) == ("train", "test")
    train = open_images(path)
    assert train.classes == ("AM General Hummer", "Acura RL")
    assert content(train) == [
        ("stanford_cars/cars_train/00001.jpg", "Acura RL"),
        ("stanford_cars/cars_train/00002.jpg", "AM General Hummer"),
    ]
    test = open_images(path, "test")
    assert [int(label) for label in test.labels] == [0, 1]
    assert test.read(1) == (tmp_path / "stanford_cars" / "cars_test" / "00002.jpg").read_bytes()


def test_cars_without_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cars(tmp_path / "stanford_cars")
    (tmp_path / "stanford_cars" / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(FileNotFoundError, match=r"cars_test_annos_withlabels\.mat"):
        open_images(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ModuleNotFoundError) as missing:
        open_images(tmp_path)
    assert missing.value.name == "scipy.io"


def test_without_labels_each_image_is_listed_once(tmp_path: Path) -> None:
    root = make_cub(tmp_path / "CUB_200_2011")
    plant(root / "segmentations", "001.Albatross/A_1.png")
    for path in (tmp_path, root):
        images = open_unlabeled(path)
        names = [images.name(i) for i in range(len(images))]
        assert names == [
            f"images/{line.split(' ', 1)[1]}" for line in (root / "images.txt").read_text().splitlines()
        ]
        assert images.read(2)
    planes = make_aircraft(tmp_path / "planes" / "fgvc-aircraft-2013b")
    assert len(open_unlabeled(planes)) == sum(len(open_images(planes, split)) for split in splits(planes))


def test_torchvision_needs_the_name_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="planes should be named fgvc-aircraft-2013b"):
        open_images(make_aircraft(tmp_path / "planes"))
    with pytest.raises(UsageError, match="cars should be named stanford_cars"):
        open_images(make_cars(tmp_path / "cars"))
