"""The kind of reduction is fixed when the layer is created, and does not depend on the input."""

from __future__ import annotations

import pytest
import torch

from covpool.nn import CovPool

B, C, D = 3, 12, 5
MAP, TOKENS, SEQUENCE, LAST = (B, C, 4, 6), (B, 24, C), (B, C, 24), (B, 4, 6, C)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("auto", "convolution"), ("channels_first", "convolution"), ("channels_last", "linear")],
)
def test_auto_follows_the_layout(layout: str, kind: str) -> None:
    pool = CovPool(C, dim=D, layout=layout)
    assert pool.reduction.kind == kind
    assert (pool.reduction.norm is None) == (kind == "linear")


@pytest.mark.parametrize(
    ("layout", "shape", "fix"),
    [
        ("auto", TOKENS, 'is for maps .*layout="channels_last"'),
        ("channels_first", SEQUENCE, 'is for maps .*reduction="linear"'),
        ("channels_last", LAST, 'is for tokens .*reduction="convolution"'),
    ],
)
def test_input_of_the_other_kind_is_refused_with_the_fix(
    layout: str, shape: tuple[int, ...], fix: str
) -> None:
    x = torch.randn(shape)
    with pytest.raises(ValueError, match=f"x has {x.ndim} dimensions, but the reduction of this layer {fix}"):
        CovPool(C, dim=D, layout=layout)(x)
    assert CovPool(C, dim=None, layout=layout)(x).shape == (B, C * (C + 1) // 2)
    for kind in ("convolution", "linear"):
        assert CovPool(C, dim=D, layout=layout, reduction=kind)(x).shape == (B, D * (D + 1) // 2)


def test_every_layer_that_takes_tokens_trains_all_its_parameters() -> None:
    pool = CovPool(C, dim=D, layout="channels_last")
    pool(torch.randn(TOKENS)).square().sum().backward()
    assert all(parameter.grad.any() for parameter in pool.parameters())


# State dicts of early versions. Their default layer used its BatchNorm for maps and bypassed it for tokens.
