from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from covpool.data.sources import open_images
from covpool.inference.forward import open_split
from covpool.models import create_model
from covpool.models.model import PooledClassifier
from tests.data.trees import plant


def a_model(*classes: str) -> PooledClassifier:
    model = create_model("test_resnet", dim=8, num_classes=len(classes))
    model.classes = classes
    return model


def a_folder(root: Path, *classes: str) -> str:
    return str(plant(root, *[f"{split}/{name}/a.jpg" for split in ("train", "test") for name in classes]))


def test_the_images_of_a_split(tmp_path: Path) -> None:
    images = open_split(a_model("jay", "wren"), a_folder(tmp_path, "jay", "wren"), "test")
    assert images.classes == ("jay", "wren")
    assert [images.name(i) for i in range(len(images))] == ["test/jay/a.jpg", "test/wren/a.jpg"]


@pytest.mark.parametrize("known", [("jay", "tit", "wren"), ("wren", "jay"), ("tit", "wren", "jay")])
def test_labels_are_the_models(tmp_path: Path, known: tuple[str, ...]) -> None:
    """This holds even if a class has no images here, or if the order differs."""
    images = open_split(a_model(*known), a_folder(tmp_path, "jay", "wren"), "test")
    assert images.classes == known
    assert [known[int(label)] for label in np.asarray(images.labels)] == ["jay", "wren"]
    assert [images.name(i) for i in range(len(images))] == ["test/jay/a.jpg", "test/wren/a.jpg"]
    assert images.read(1) == (tmp_path / "test/wren/a.jpg").read_bytes()
    plain = open_images(tmp_path, "test")
    assert len({plain.fingerprint(), images.fingerprint()}) == 2
    assert images.fingerprint() == open_split(a_model(*known), str(tmp_path), "test").fingerprint()


def test_other_classes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 1 class that the bundle does not know, first 'wren'"):
        open_split(a_model("jay", "tit"), a_folder(tmp_path, "jay", "wren"), "test")


def test_a_bundle_without_names_must_have_as_many_classes(tmp_path: Path) -> None:
    path = a_folder(tmp_path, "jay", "wren")
    model = a_model("a", "b", "c")
    model.classes = None
    with pytest.raises(ValueError, match=r"has 3 classes, and .* has 2"):
        open_split(model, path, "test")
