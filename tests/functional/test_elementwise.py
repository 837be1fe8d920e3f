"""Signed square roots and unit vectors: values, derivatives and zeros."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from covpool.functional.numerics import l2_normalized, signed_root


def test_derivatives() -> None:
    x = torch.tensor([[0.3, -2.0, 1.1], [4.0, -0.2, 7.0]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(signed_root, x, check_forward_ad=True)
    assert gradgradcheck(signed_root, x)
    # The scale (the largest entry) is treated as a constant in the derivative. This is exact, because the
    # result does not depend on the scale.
    assert gradcheck(l2_normalized, x, check_forward_ad=True)
    assert gradgradcheck(l2_normalized, x)


@pytest.mark.parametrize("function", [signed_root, l2_normalized])
def test_zero_is_zero_with_zero_gradient(function: object) -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    assert callable(function)
    y = function(x)
    y.sum().backward()
    assert x.grad is not None
    assert (y == 0).all()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("scale", [1e-37, 1e-12, 1e12, 1e37])
def test_unit_length_at_every_scale(scale: float) -> None:
    v = torch.tensor([3.0, -4.0, 0.0])
    torch.testing.assert_close(l2_normalized(v * scale), v / 5)


def test_a_nan_stays_in_its_row() -> None:
    v = l2_normalized(torch.tensor([[torch.nan, 1.0], [3.0, 4.0]]))
    torch.testing.assert_close(v[1], torch.tensor([0.6, 0.8]))
    assert v[0].isnan().all()
