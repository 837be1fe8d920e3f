"""Photographs to names and probabilities, from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from covpool.data.decode import decode
from covpool.errors import BadImageError
from covpool.models import create_model
from covpool.models.model import PooledClassifier
from tests.data.pictures import encode, photo


@pytest.fixture(scope="module")
def model() -> PooledClassifier:
    torch.manual_seed(0)
    made = create_model("test_resnet", dim=8, num_classes=3, image_size=64)
    made.classes = ("jay", "owl", "tit")
    return made.train()


def test_a_path_an_image_and_a_list(model: PooledClassifier, tmp_path: Path) -> None:
    data = encode(photo((80, 60)), "JPEG")
    (tmp_path / "bird.jpg").write_bytes(data)
    found = model.predict(tmp_path / "bird.jpg")
    logits = model.eval()(model.transform(decode(data))[None])
    model.train()
    assert [one.name for one in found] == [model.classes[k] for k in logits[0].argsort(descending=True)]
    torch.testing.assert_close(
        torch.tensor([one.probability for one in found]), logits.softmax(1)[0].sort(descending=True)[0]
    )
    assert model.predict(str(tmp_path / "bird.jpg"), top=1) == found[:1]
    assert model.predict([Image.open(tmp_path / "bird.jpg")] * 40) == [found] * 40
    assert all(module.training for module in model.modules()), "it was in training mode before"


def test_a_picture_that_lies_on_its_side(model: PooledClassifier) -> None:
    upright = photo((80, 60)).convert("RGB")
    lying = upright.rotate(90, expand=True)
    lying.getexif()[0x0112] = 6  # EXIF orientation: rotate by 90 degrees clockwise
    assert model.predict(lying) == model.predict(upright)


def test_mistakes(model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / "page.jpg").write_bytes(b"<html>")
    with pytest.raises(BadImageError):
        model.predict(tmp_path / "page.jpg")
    with pytest.raises(FileNotFoundError):
        model.predict("none.jpg")
    with pytest.raises(ValueError, match="has no classifier"):
        create_model("test_resnet", dim=8, num_classes=0, image_size=64).predict("bird.jpg")
