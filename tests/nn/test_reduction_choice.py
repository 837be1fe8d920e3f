"""The kind of reduction is fixed when the layer is created, and does not depend on the input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covpool.functional import isqrt_cov, triu_vec
from covpool.nn import CovPool
from tests.functional.tolerances import assert_close

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


def old_state(*, batches: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = {
        name: torch.randn(D, generator=generator).abs() if batches else new
        for name, new in {
            "weight": 0.9 * torch.ones(D),  # changed by weight decay, not by a gradient
            "bias": torch.zeros(D),
            "running_mean": torch.zeros(D),
            "running_var": torch.ones(D),
        }.items()
    }
    return {
        "reduction.projection.weight": torch.randn(D, C, 1, 1, generator=generator),
        **{f"reduction.norm.{name}": value for name, value in numbers.items()},
        "reduction.norm.num_batches_tracked": torch.tensor(batches),
    }


@pytest.mark.parametrize("options", [{"layout": "channels_last"}, {"reduction": "linear"}], ids=str)
def test_an_old_layer_trained_on_tokens_gives_the_same_result(options: dict[str, str]) -> None:
    state, x = old_state(batches=0), torch.randn(TOKENS)
    pool = CovPool(C, dim=D, **options).eval()
    pool.load_state_dict(state)
    reduced = x @ state["reduction.projection.weight"].flatten(1).T
    assert_close(pool(x), triu_vec(isqrt_cov(reduced.mT)))


@pytest.mark.parametrize("layout", ["auto", "channels_first"])
def test_an_old_layer_trained_on_maps_gives_the_same_result(layout: str) -> None:
    state, x = old_state(batches=7), torch.randn(MAP)
    pool = CovPool(C, dim=D, layout=layout).eval()
    pool.load_state_dict(state)
    y = torch.nn.functional.conv2d(x, state["reduction.projection.weight"])
    norm = torch.nn.BatchNorm2d(D).eval()
    norm.load_state_dict({k.removeprefix("reduction.norm."): v for k, v in state.items() if "norm" in k})
    assert_close(pool(x), triu_vec(isqrt_cov(norm(y).relu().flatten(2))))


def test_an_old_layer_trained_on_maps_does_not_load_for_tokens() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key.*norm"):
        CovPool(C, dim=D, layout="channels_last").load_state_dict(old_state(batches=7))
