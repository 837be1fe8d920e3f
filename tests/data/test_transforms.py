"""Transforms: the pixels of timm in evaluation, a pure function of a key in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision import transforms as v1

from covpool.data.order import torch_seeded
from covpool.data.transforms import (
    EIGENVALUES,
    EIGENVECTORS,
    Augmentation,
    Lighting,
    Preprocessing,
    evaluation_transform,
    training_transform,
)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return smooth colors with noise, so that every pixel identifies its position."""
    noise = np.random.default_rng(seed).normal(0, 20, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    ramps = np.stack([255 * x / width, 255 * y / height, 255 * (x + y) / (width + height)], axis=-1)
    return Image.fromarray(np.clip(ramps + noise, 0, 255).astype(np.uint8))


# One step of a pixel (1 of 255) is more than 0.01, so the pixels must be equal. The values may differ by the
# rounding of 1 / 255.
ROUNDING = {"rtol": 0, "atol": 1e-6}

CONFIGS: list[dict[str, Any]] = [
    {"input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bilinear"},
    {"input_size": (3, 224, 224), "crop_pct": 0.95, "interpolation": "bicubic"},
    {"input_size": (3, 288, 288), "crop_pct": 1.0, "interpolation": "bicubic"},
    {"input_size": (3, 96, 96), "crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "squash"},
    {"input_size": (3, 64, 64), "crop_pct": 0.77, "interpolation": "lanczos", "mean": (0.5,) * 3},
]


@pytest.mark.parametrize("size", [(300, 200), (64, 64), (257, 1000), (31, 47)])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_evaluation_gives_the_pixels_of_timm(config: dict[str, Any], size: tuple[int, int]) -> None:
    config = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "crop_mode": "center", **config}
    expected = timm.data.create_transform(**config, is_training=False)(picture(*size))
    found = evaluation_transform(Preprocessing.of(config))(picture(*size))
    assert found.shape == config["input_size"]
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_evaluation_gives_the_pixels_of_torchvisions_reference() -> None:
    reference = v1.Compose(
        [
            v1.Resize(256, interpolation=v1.InterpolationMode.BILINEAR),
            v1.CenterCrop(224),
            v1.ToTensor(),
            v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    ours = evaluation_transform(Preprocessing(224, 0.875, interpolation="bilinear"))
    torch.testing.assert_close(ours(picture(320, 240)), reference(picture(320, 240)), **ROUNDING)


def test_preprocessing_of_a_model() -> None:
    cfg = timm.create_model("test_resnet", pretrained=False).pretrained_cfg
    found = Preprocessing.of(timm.data.resolve_data_config(pretrained_cfg=cfg))
    assert (found.size, found.mean) == (cfg["input_size"][1], cfg["mean"])
    assert (found.crop_pct, found.interpolation) == (cfg["crop_pct"], cfg["interpolation"])


AUGMENTATIONS = [
    Augmentation(),
    Augmentation(colour="lighting"),
    Augmentation(colour="jitter"),
    Augmentation("random", shorter_side=48),
    Augmentation("random", shorter_side=(40, 80), colour="lighting"),
    Augmentation("random", flip=0),
]
SMALL = Preprocessing(32, crop_pct=0.8)


@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=str)
def test_training_is_a_function_of_the_key_and_of_nothing_else(augmentation: Augmentation) -> None:
    transform = training_transform(SMALL, augmentation)

    def keyed(*key: int) -> torch.Tensor:
        with torch_seeded("augmentation", *key):
            made: torch.Tensor = transform(picture(90, 70))
            return made

    first = keyed(0, 1, 2)
    before = torch.get_rng_state()
    others = [keyed(0, 1, 3), keyed(0, 2, 2), keyed(1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(keyed(0, 1, 2), first)
    assert first.shape == (3, 32, 32)
    assert first.dtype == torch.float32
    assert not any(torch.equal(first, other) for other in others)


def test_a_random_crop_is_a_part_of_the_resized_image() -> None:
    augmentation = Augmentation("random", shorter_side=48, flip=0)
    transform = training_transform(SMALL, augmentation)
    whole = evaluation_transform(Preprocessing(48, 1.0))(picture(64, 64))
    parts = whole.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4)
    found = set()
    for _ in range(40):
        made = transform(picture(64, 64))
        matches = (parts == made).flatten(2).all(-1).nonzero().tolist()
        assert len(matches) == 1
        found.add(tuple(matches[0]))
    assert len(found) > 30
    assert {0, 16} <= {place for match in found for place in match} <= set(range(17))


def test_the_shorter_side_takes_every_value_of_its_range() -> None:
    resize = training_transform(SMALL, Augmentation("random", shorter_side=(40, 43))).transforms[0]
    sides = {resize(picture(50, 60)).size for _ in range(60)}
    assert sides == {(40, 48), (41, 49), (42, 50), (43, 51)}


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_training_on_the_part_that_is_seen_at_test_time(crop_mode: Any) -> None:
    preprocessing = Preprocessing(32, crop_pct=0.8, crop_mode=crop_mode)
    expected = evaluation_transform(preprocessing)(picture(90, 70))
    for flip, image in ((0, expected), (1, expected.flip(-1))):
        assert torch.equal(
            training_transform(preprocessing, Augmentation("test", flip=flip))(picture(90, 70)), image
        )


def test_half_of_the_images_are_flipped() -> None:
    transform = training_transform(Preprocessing(32, 1.0), Augmentation("random"))
    plain = evaluation_transform(Preprocessing(32, 1.0))(picture(32, 32))
    made = [transform(picture(32, 32)) for _ in range(200)]
    assert all(torch.equal(each, plain) or torch.equal(each, plain.flip(-1)) for each in made)
    assert 70 < sum(torch.equal(each, plain) for each in made) < 130


def test_lighting_shifts_along_the_components_of_imagenets_colours() -> None:
    values = torch.rand(3, 5, 4)
    shifts = torch.stack([Lighting(0.1)(values) - values for _ in range(4000)])
    assert (shifts - shifts[:, :, :1, :1]).abs().max() < 1e-6
    # The columns are an orthonormal basis, to the four published digits.
    vectors = torch.tensor(EIGENVECTORS)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(3), rtol=0, atol=1e-3)
    along = shifts[:, :, 0, 0] @ vectors
    torch.testing.assert_close(along.std(0), 0.1 * torch.tensor(EIGENVALUES), rtol=0.05, atol=0)
    # The first component is brightness: nearly the same for red, green and blue.
    assert torch.tensor(EIGENVECTORS)[:, 0].std() < 0.01


def test_strengths() -> None:
    strong = training_transform(SMALL, Augmentation(colour="lighting", strength=0.5)).transforms
    assert [step.strength for step in strong if isinstance(step, Lighting)] == [0.5]
    none = training_transform(SMALL, Augmentation("random", flip=0, colour="jitter", strength=0.0))
    plain = training_transform(SMALL, Augmentation("random", flip=0))
    with torch_seeded("augmentation", 0):
        expected = plain(picture(50, 50))
    with torch_seeded("augmentation", 0):
        assert torch.equal(none(picture(50, 50)), expected)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: Preprocessing(crop_mode="border"),
            "crop_mode must be one of 'center', 'squash'; got 'border'",
        ),
        (lambda: Preprocessing(interpolation="random"), "interpolation must be one of 'bilinear'"),
        (lambda: Preprocessing(0), "size must be at least 1"),
        (lambda: Preprocessing(crop_pct=1.5), "size must be at least 1 and crop_pct in"),
        (lambda: Preprocessing.of({"input_size": (2, 28, 28)}), "images must be square, with 3 channels"),
        (
            lambda: Preprocessing.of({"input_size": (3, 8, 8), "mean": [0], "std": [1]}),
            "mean and std must have one value per channel",
        ),
        (lambda: Augmentation("five"), "crop must be one of 'resized', 'random', 'test'; got 'five'"),
        (lambda: Augmentation(colour="sepia"), "colour must be one of 'none', 'lighting', 'jitter'"),
        (
            lambda: training_transform(SMALL, Augmentation("random", shorter_side=31)),
            "shorter_side must be at least 32, the size of the crop; got 31",
        ),
    ],
)
def test_mistakes(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        call()
