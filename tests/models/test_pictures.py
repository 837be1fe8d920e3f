"""``model.predict`` with arrays and tensors, as other libraries give them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from covpool.data import transforms
from covpool.errors import UsageError
from covpool.models import create_model
from covpool.models.model import PooledClassifier
from tests.data.pictures import photo


@pytest.fixture(scope="module")
def model() -> PooledClassifier:
    torch.manual_seed(0)
    return create_model("test_resnet", dim=8, num_classes=3, image_size=64)


def test_arrays_and_tensors_are_predicted_as_the_file(
    model: PooledClassifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture = Image.fromarray(np.asarray(photo((48, 40)).convert("RGB")))
    picture.save(tmp_path / "bird.png")
    pixels = np.asarray(picture)
    expected = model.predict(tmp_path / "bird.png")
    first = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    transforms._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger="covpool"):
        same = [pixels, pixels.transpose(2, 0, 1), first, first / 255, first.float(), pixels / 255]
        for image in [*same, model.transform(picture)]:
            assert model.predict(image) == expected
    said = "\n".join(caplog.messages)
    for assumption in ("come first", "come last", "0 to 1", "0 to 255", "normalized already"):
        assert said.count(assumption) >= 1
    assert len(caplog.messages) == 5
    for batch in (np.stack([pixels, pixels]), torch.stack([first, first]), [pixels, tmp_path / "bird.png"]):
        found = model.predict(batch)
        assert [[one.name for one in row] for row in found] == [[one.name for one in expected]] * 2
    overshoot = np.clip(pixels / 255 * 1.04, -0.02, 1.04)
    assert model.predict(overshoot) == model.predict((overshoot * 255).clip(0, 255).round().astype(np.uint8))
    dark = [pixels, pixels // 50]  # the range of a batch counts, not that of each image
    assert model.predict(np.stack(dark).astype(float)) == model.predict(dark)
    assert model.predict([]) == model.predict(np.zeros((0, 8, 8, 3))) == []
    gray = picture.convert("L")
    assert model.predict(np.asarray(gray)) == model.predict(gray)


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (np.zeros((5, 7, 9), np.uint8), r"must be \(H, W, 3\), .* got \(5, 7, 9\)"),
        (np.zeros((8, 8, 3), np.int64), "uint8 or floating-point values; got int64"),
        (np.full((8, 8, 3), 1000.0), "values of an image are from 0 to 1000, and not from 0 to 1"),
        (np.full((8, 8, 3), 2.5), "values of an image are from 0 to 2.5, and not from 0 to 1"),
        (np.full((8, 8, 3), np.nan), "values that are NaN or infinite"),
        (b"GIF89a", "an array or a tensor; got bytes"),
        (3, "a path, an image of Pillow, an array or a tensor; got int"),
        (-torch.ones(3, 8, 8), r"a preprocessed image must be \(3, 64, 64\); got \(3, 8, 8\)"),
    ],
)
def test_images_that_cannot_be_used(model: PooledClassifier, image: object, sentence: str) -> None:
    with pytest.raises((UsageError, TypeError), match=sentence):
        model.predict(image)  # type: ignore[arg-type]


def test_names_must_be_as_many_as_classes(model: PooledClassifier) -> None:
    model.classes = ("jay", "owl")
    try:
        with pytest.raises(UsageError, match="2 class names for 3 classes"):
            model.predict(photo((48, 40)))
    finally:
        model.classes = None
