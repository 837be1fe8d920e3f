"""The pair of species and the pair of channels are those that the rule says, and the picture can be drawn."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from covpool.reproduce.why_second_order import table
from covpool.reproduce.why_second_order.measuring import (
    Features,
    measure,
    nearest_species,
    share_right,
    telling_channels,
)
from covpool.reproduce.why_second_order.picture import covariance_within, draw, ellipse, typical
from tests.data.pictures import photo

EACH, PLACES = 40, 30


def made_up(seed: int) -> Features:
    """Three species, four channels: two differ by the covariance of 1 and 3, the third by its mean."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(3 * EACH, 4, PLACES, generator=generator)
    labels = torch.arange(3).repeat_interleave(EACH)
    maps[labels == 0, 3] += maps[labels == 0, 1]
    maps[labels == 1, 3] -= maps[labels == 1, 1]
    for label in range(2):  # as equal as means can be
        maps[labels == label] -= maps[labels == label].mean((0, 2), keepdim=True)
    maps[labels == 2] += 2
    names = tuple(f"{i}.jpg" for i in range(len(maps)))
    return Features(maps, labels, names, ("1.A_Bird", "2.B_Bird", "3.C_Bird"))


def test_species_with_near_means_are_found() -> None:
    one = made_up(0)
    assert nearest_species(one.maps.mean(-1), one.labels) == (0, 1)


def test_channels_that_vary_together_are_found() -> None:
    one = made_up(0)
    first, second = one.of(0).maps, one.of(1).maps
    assert telling_channels(first, second) == (1, 3)
    second = second.clone()
    second[:, 1] += 1  # now its mean tells, so it is no example
    assert 1 not in telling_channels(first, second)


@pytest.mark.parametrize(("is_higher", "expected"), [(True, 5 / 6), (False, 1 / 6)])
def test_pairs_that_are_told_apart(is_higher: bool, expected: float) -> None:
    first, second = Tensor([2.0, 5.0, 9.0]), Tensor([1.0, 3.0])
    assert share_right(first, second, first_is_higher=is_higher) == pytest.approx(expected)


def test_measured_and_drawn(tmp_path: Path) -> None:
    results = {"arguments": {"channels": 4}, **measure(made_up(0), made_up(1))}
    assert [one["name"] for one in results["species"]] == ["A Bird", "B Bird"]
    mean, other_mean, covariance = (row["right"] for row in results["numbers"])
    assert covariance > 0.99
    assert max(mean, other_mean) < 0.7
    assert "| their covariance | 0.9" in table(results)
    for one in results["species"]:
        for image in one["images"]:
            photo().save(tmp_path / image["name"])
    with Image.open(io.BytesIO(draw(results, tmp_path))) as picture:
        assert picture.width > 1000
        assert np.asarray(picture.convert("L")).std() > 20


def test_an_ellipse_has_the_deviations_of_its_matrix() -> None:
    points = ellipse((3.0, -1.0), np.array([[4.0, 0.0], [0.0, 1.0]]), 2)
    np.testing.assert_allclose(points.max(1), [7.0, 1.0], atol=1e-2)
    np.testing.assert_allclose(points.min(1), [-1.0, -3.0], atol=1e-2)


def test_the_covariance_is_within_images() -> None:
    images = [{"places": [[x, x + 2], [x, x + 2]]} for x in (0, 100)]
    np.testing.assert_allclose(covariance_within(images), np.ones((2, 2)))


def test_typical_images_come_first() -> None:
    images = [{"numbers": [0, 0, value]} for value in (9, 1, 5)]
    assert [image["numbers"][2] for image in typical(images)] in ([5, 9, 1], [5, 1, 9])
