"""What a user reads who made a mistake that is easy to make."""

from __future__ import annotations

import pytest
import torch

from covpool.nn import CovPool, PostCompensation


def test_dim_given_in_the_place_of_the_method() -> None:
    with pytest.raises(TypeError, match=r"method must be a name.*got 256.*dim="):
        CovPool(2048, 256)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [None, 2])
def test_map_without_positions(dim: int | None) -> None:
    with pytest.raises(ValueError, match="x must have at least one position"):
        CovPool(4, dim=dim)(torch.zeros(2, 4, 0, 3))


def test_norm_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"t must be \(..., 1, 1\)"):
        PostCompensation()(torch.eye(3).expand(2, 3, 3), torch.ones(2))
