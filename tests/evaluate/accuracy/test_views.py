from __future__ import annotations

import pickle

import pytest
import torch
from torchvision.transforms import functional

from covpool.data.transforms import Preprocessing, evaluation_transform, ten_crop_transform
from covpool.inference.forward import Forward, Views, prepare
from covpool.models import create_model
from tests.data.pictures import photo

PREPROCESSING = Preprocessing(size=32, crop_pct=0.8)
CPU = torch.device("cpu")


def forward(views: Views) -> Forward:
    torch.manual_seed(0)
    model = prepare(create_model("test_resnet", dim=8, num_classes=3), CPU)
    return Forward(model, device=CPU, views=views, preprocessing=PREPROCESSING)


def test_ten_crops_are_those_of_torchvision() -> None:
    # The margins are even, so that the center crop of the flip is the flip of the center crop.
    picture = photo((48, 40))
    transform = pickle.loads(pickle.dumps(ten_crop_transform(PREPROCESSING)))  # as for workers
    crops = transform(picture)
    resized = functional.resize(picture, 40, functional.InterpolationMode.BICUBIC)
    expected = [
        functional.normalize(functional.to_tensor(part), PREPROCESSING.mean, PREPROCESSING.std)
        for part in functional.ten_crop(resized, 32)
    ]
    torch.testing.assert_close(crops, torch.stack(expected))
    center = evaluation_transform(PREPROCESSING)(picture)
    torch.testing.assert_close(crops[4], center)
    torch.testing.assert_close(crops[9], center.flip(-1))


@pytest.mark.parametrize("views", ["one", "flip", "ten-crop"])
def test_every_view_has_its_logits(views: Views) -> None:
    run = forward(views)
    pictures = [photo((61, 47 + i)) for i in range(3)]
    found = run(torch.stack([run.transform()(picture) for picture in pictures]))["logits"]
    images = torch.stack([evaluation_transform(PREPROCESSING)(picture) for picture in pictures])
    with torch.inference_mode():
        if views == "ten-crop":
            crops = torch.stack([ten_crop_transform(PREPROCESSING)(picture) for picture in pictures])
            expected = torch.stack([run.model(crop) for crop in crops.unbind(1)])
        else:
            both = (images, images.flip(-1)) if views == "flip" else (images,)
            expected = torch.stack([run.model(view) for view in both])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_mirrored_images_get_the_same_logits_by_both_views() -> None:
    images, both, one = torch.randn(2, 3, 32, 32), forward("flip"), forward("one")
    mean, flipped = (both(batch)["logits"].mean(dim=0) for batch in (images, images.flip(-1)))
    torch.testing.assert_close(mean, flipped)
    assert not torch.allclose(one(images)["logits"], one(images.flip(-1))["logits"])


def test_pixels_give_the_bits_of_floats() -> None:
    """Workers send pixels in uint8, which are normalized per batch."""
    run, pictures = forward("one"), [photo((61, 47 + i)) for i in range(3)]
    pixels = torch.stack([run.transform()(picture) for picture in pictures])
    floats = torch.stack([evaluation_transform(PREPROCESSING)(picture) for picture in pictures])
    assert pixels.dtype == torch.uint8
    assert torch.equal(run(pixels)["logits"], run(floats)["logits"])


def test_padding_leaves_no_trace() -> None:
    whole, images = forward("flip"), torch.randn(3, 3, 32, 32)
    padded = forward("flip")
    padded.pad_to = 8
    found = padded(images)["logits"]
    assert found.shape == (2, 3, 3)
    torch.testing.assert_close(found, whole(images)["logits"])
