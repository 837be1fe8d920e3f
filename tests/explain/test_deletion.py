from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covpool.explain.deletion import areas, centre_first


def classify(images: Tensor) -> Tensor:
    """Sure of class 1 by the contrast of one corner alone."""
    corner = images[:, :, :16, :16].std((1, 2, 3))
    return torch.stack([torch.zeros_like(corner), 20 * corner - 10], 1)


def test_the_right_order_is_the_best() -> None:
    torch.manual_seed(0)
    image = torch.randn(3, 64, 64)
    corner, opposite = torch.zeros(64, 64), torch.zeros(64, 64)
    corner[:16, :16], opposite[-16:, -16:] = 1, 1
    found = areas(classify, image, 1, {"right": corner, "wrong": opposite, "centre": centre_first(64, 64)})
    assert found["right"].deletion < found["centre"].deletion
    assert found["right"].deletion < found["wrong"].deletion
    assert found["right"].insertion > found["wrong"].insertion


def test_all_or_nothing() -> None:
    """At the ends the curves do not depend on the order; a constant classifier gives its constant."""
    image = torch.randn(3, 32, 32)
    found = areas(lambda x: torch.zeros(len(x), 4), image, 2, {"any": torch.rand(32, 32)})
    assert found["any"].deletion == pytest.approx(0.25)
    assert found["any"].insertion == pytest.approx(0.25)


def test_the_centre_comes_first() -> None:
    order = centre_first(5, 7)
    assert order.flatten().argmax() == 2 * 7 + 3
    assert order.flatten().argmin() in (0, 6, 28, 34)
