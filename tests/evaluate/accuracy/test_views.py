from __future__ import annotations

import pickle

import pytest
import torch
from torchvision.transforms import functional

from covpool.data.transforms import Preprocessing
from covpool.evaluate.accuracy import AveragedViews, Views, views_transform
from covpool.models import create_model
from tests.data.pictures import photo

PREPROCESSING = Preprocessing(size=32, crop_pct=0.8)


def test_ten_crops_are_those_of_torchvision() -> None:
    picture = photo((48, 40))  # of even margins, so that the mirrored centre is the centre mirrored
    transform = pickle.loads(pickle.dumps(views_transform(PREPROCESSING, "ten-crop")))  # for workers
    crops = transform(picture)
    resized = functional.resize(picture, 40, functional.InterpolationMode.BICUBIC)
    expected = [
        functional.normalize(functional.to_tensor(part), PREPROCESSING.mean, PREPROCESSING.std)
        for part in functional.ten_crop(resized, 32)
    ]
    torch.testing.assert_close(crops, torch.stack(expected))
    centre = views_transform(PREPROCESSING, "one")(picture)
    torch.testing.assert_close(crops[4], centre)
    torch.testing.assert_close(crops[9], centre.flip(-1))


@pytest.mark.parametrize("views", ["one", "flip", "ten-crop"])
def test_logits_are_averaged_over_views(views: Views) -> None:
    model = create_model("test_resnet", dim=8, num_classes=3).eval()
    images = torch.stack([views_transform(PREPROCESSING, views)(photo((61, 47 + i))) for i in range(3)])
    with torch.inference_mode():
        found = AveragedViews(model, views)(images)
        if views == "one":
            expected = model(images)
        elif views == "flip":
            expected = (model(images) + model(images.flip(-1))) / 2
        else:
            expected = torch.stack([model(image).mean(dim=0) for image in images])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_mirrored_images_get_the_same_logits_by_both_views() -> None:
    model = create_model("test_resnet", dim=8, num_classes=3).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        both = AveragedViews(model, "flip")
        torch.testing.assert_close(both(images), both(images.flip(-1)))
        assert not torch.allclose(model(images), model(images.flip(-1)))
