"""Channel layouts: shapes, equal results for all layouts, and no copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covpool.functional import isqrt_cov, triu_vec
from covpool.nn import CovPool
from tests.functional.tolerances import assert_close

B, C = 2, 12

LAYOUTS = [
    pytest.param("auto", (B, C, 3, 5), id="map"),
    pytest.param("auto", (B, C, 2, 3, 4), id="video"),
    pytest.param("auto", (B, 15, C), id="tokens"),
    pytest.param("channels_first", (B, C, 15), id="signal"),
    pytest.param("channels_first", (B, C, 3, 5), id="map-told"),
    pytest.param("channels_first", (B, C, 2, 3, 4), id="video-told"),
    pytest.param("channels_last", (B, 15, C), id="tokens-told"),
    pytest.param("channels_last", (B, 3, 5, C), id="swin"),
    pytest.param("channels_last", (B, 2, 3, 4, C), id="video-swin"),
]


@pytest.mark.parametrize("dim", [None, 5])
@pytest.mark.parametrize(("layout", "shape"), LAYOUTS)
def test_shape_of_the_result(layout: str, shape: tuple[int, ...], dim: int | None) -> None:
    pool = CovPool(C, dim=dim, layout=layout, reduction="linear" if len(shape) == 3 else "convolution")
    d = dim or C
    assert pool(torch.randn(shape)).shape == (B, d * (d + 1) // 2)
    assert pool.out_features == d * (d + 1) // 2


def test_the_tokens_of_the_design() -> None:
    assert CovPool(768, dim=64, layout="channels_last")(torch.randn(2, 196, 768)).shape == (2, 2080)


@pytest.mark.parametrize(
    ("layout", "to_layout"),
    [
        ("auto", lambda x: x),
        ("auto", lambda x: x.unflatten(2, (1, 3))),
        ("auto", lambda x: x.flatten(2).mT),
        ("channels_first", lambda x: x.flatten(2)),
        ("channels_last", lambda x: x.flatten(2).mT),
        ("channels_last", lambda x: x.permute(0, 2, 3, 1)),
    ],
)
@pytest.mark.parametrize("contiguous", [False, True])
def test_layouts_agree_with_the_function(layout: str, to_layout, contiguous: bool) -> None:
    x = torch.randn(B, C, 3, 5)
    given = to_layout(x).contiguous() if contiguous else to_layout(x)
    expected = triu_vec(isqrt_cov(x.flatten(2)))
    assert_close(CovPool(C, dim=None, layout=layout)(given), expected)


@pytest.mark.parametrize(
    ("dim", "reduction"), [(None, "auto"), (5, "convolution"), (5, "linear")], ids=["none", "conv", "linear"]
)
def test_a_map_and_its_tokens_agree_in_value_and_gradient(dim: int | None, reduction: str) -> None:
    pool = CovPool(C, dim=dim, reduction=reduction)
    map_ = torch.randn(B, C, 3, 5, requires_grad=True)
    tokens = map_.detach().flatten(2).mT.contiguous().requires_grad_()
    mask = torch.rand(B, 15) > 0.3
    a, b = pool(map_, mask), pool(tokens, mask)
    g = torch.randn_like(a)
    (grad_map,), (grad_tokens,) = torch.autograd.grad(a, map_, g), torch.autograd.grad(b, tokens, g)
    assert_close(a, b)
    assert_close(grad_map.flatten(2).mT, grad_tokens)


def test_auto_takes_three_dimensions_as_tokens() -> None:
    # A square input is valid in both layouts.
    x = torch.randn(B, C, C)
    auto = CovPool(C, dim=None)(x)
    assert_close(auto, CovPool(C, dim=None, layout="channels_last")(x))
    assert not torch.allclose(auto, CovPool(C, dim=None, layout="channels_first")(x), atol=1e-2)


@pytest.mark.parametrize(
    ("layout", "make"),
    [
        ("auto", lambda: torch.randn(B, C, 3, 5)),
        ("auto", lambda: torch.randn(B, C, 3, 5).to(memory_format=torch.channels_last)),
        ("auto", lambda: torch.randn(B, C, 2, 3, 4).to(memory_format=torch.channels_last_3d)),
        ("auto", lambda: torch.randn(B, 15, C)),
        ("channels_first", lambda: torch.randn(B, C, 15)),
        ("channels_last", lambda: torch.randn(B, 3, 5, C)),
        ("channels_last", lambda: torch.randn(B, 2, 3, 4, C)),
    ],
    ids=["map", "channels_last_memory", "channels_last_3d_memory", "tokens", "signal", "swin", "video-swin"],
)
def test_the_method_receives_a_view(layout: str, make) -> None:
    pool, received = CovPool(C, dim=None, layout=layout), []
    pool.pooling.register_forward_pre_hook(lambda _, args: received.append(args[0]))
    x = make()
    pool(x)
    assert received[0].data_ptr() == x.data_ptr()
    assert received[0].shape == (B, C, x.numel() // (B * C))


@pytest.mark.parametrize(
    ("layout", "make", "stride"),
    [
        ("channels_last", lambda: torch.randn(B, 15, C), (15 * 5, 1, 5)),
        ("auto", lambda: torch.randn(B, C, 3, 5).to(memory_format=torch.channels_last), (15 * 5, 1, 5)),
        ("auto", lambda: torch.randn(B, C, 3, 5), (15 * 5, 15, 1)),
    ],
    ids=["tokens", "channels_last_memory", "map"],
)
def test_memory_stays_in_its_order_through_the_reduction(layout: str, make, stride: tuple[int, ...]) -> None:
    pool, received = CovPool(C, dim=5, layout=layout), []
    pool.pooling.register_forward_pre_hook(lambda _, args: received.append(args[0]))
    pool(make())
    assert received[0].stride() == stride


@pytest.mark.parametrize(
    ("layout", "shape", "positions"),
    [
        ("auto", (B, C, 3, 5), (3, 5)),
        ("auto", (B, C, 2, 3, 4), (2, 3, 4)),
        ("channels_last", (B, 3, 5, C), (3, 5)),
    ],
)
def test_weights_as_a_map_or_flat(layout: str, shape: tuple[int, ...], positions: tuple[int, ...]) -> None:
    pool, x, weights = CovPool(C, dim=None, layout=layout), torch.randn(shape), torch.rand(B, *positions)
    assert_close(pool(x, weights), pool(x, weights.flatten(1)))
    assert not torch.allclose(pool(x, weights), pool(x), atol=1e-3)


def test_weights_follow_the_order_of_the_positions() -> None:
    x, keep = torch.randn(1, C, 3, 5), torch.zeros(1, 3, 5, dtype=torch.bool)
    keep[:, 1:, :2] = True
    cut_out: Tensor = x[:, :, 1:, :2]
    assert_close(CovPool(C, dim=None)(x, keep), CovPool(C, dim=None)(cut_out))
    swin = CovPool(C, dim=None, layout="channels_last")
    assert_close(swin(x.permute(0, 2, 3, 1), keep), CovPool(C, dim=None)(cut_out))


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        ("auto", (B, C), r"^x must be .*got shape \(2, 12\)"),
        ("auto", (B, C, 1, 1, 1, 1), "^x must be "),
        ("auto", (B, 3, 5, C), r'dimension 1 .*pass layout="channels_last"'),
        ("auto", (B, C, 15), r'dimension 2 .*pass layout="channels_first"'),
        ("channels_last", (B, C, 3, 5), r'dimension 3 .*pass layout="channels_first"'),
        ("auto", (B, 7, 3, 5), "create the layer with in_channels=7"),
        ("auto", (B, 15, 7), "create the layer with in_channels=7"),
    ],
)
def test_wrong_shapes_are_refused_with_the_fix(layout: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CovPool(C, layout=layout)(torch.randn(shape))


def test_wrong_dtypes_are_refused_with_the_fix() -> None:
    with pytest.raises(TypeError, match=r"x must be a real floating-point.*x\.float\(\)"):
        CovPool(C)(torch.zeros(B, C, 3, 5, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"weights must be bool or floating point.*weights\.bool\(\)"):
        CovPool(C)(torch.randn(B, C, 3, 5), torch.ones(B, 15, dtype=torch.long))
    with pytest.raises(TypeError, match=r"weights must be a torch\.Tensor"):
        CovPool(C)(torch.randn(B, C, 3, 5), [1.0] * 15)


@pytest.mark.parametrize("shape", [(B, 14), (1, 15), (B, 5, 3), (15,), (B, 1, 3, 5)])
def test_weights_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"weights must be \(2, 3, 5\) or \(2, 15\)"):
        CovPool(C)(torch.randn(B, C, 3, 5), torch.ones(shape))
