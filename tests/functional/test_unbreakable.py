"""Finite, correct results for degenerate, huge, tiny, half-precision, non-contiguous and empty inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from covpool.functional import covariance, inverse_matrix_sqrt, isqrt_cov, matrix_sqrt
from tests.functional import paper
from tests.functional.degenerate import CONSTANTS, KINDS, inputs, poolings
from tests.functional.pooling import (
    NORMALIZATIONS,
    SIDES,
    VALUE_TOLERANCE,
    Pooling,
    assert_near,
    assert_sound,
)
from tests.functional.samples import UNEVEN, chosen

sides = pytest.mark.parametrize("side", SIDES)
normalizations = pytest.mark.parametrize("normalization", NORMALIZATIONS)
fuzz = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@fuzz
@given(poolings, inputs())
def test_any_input(pooling: Pooling, features: tuple[Tensor, Tensor | None]) -> None:
    assert_sound(pooling, *features)


@pytest.mark.slow
@settings(fuzz, max_examples=5000, derandomize=False)
@given(poolings, inputs())
def test_any_input_at_length(pooling: Pooling, features: tuple[Tensor, Tensor | None]) -> None:
    assert_sound(pooling, *features)


@sides
@normalizations
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: Callable[..., Tensor], side: str, normalization: str) -> None:
    """Test each kind by name, so that a failure names the kind. Hypothesis does not."""
    x = kind(2, 5, 7, torch.Generator().manual_seed(3)).float()
    for autocast in (False, True):
        pooling = Pooling(normalization=normalization, side=side, autocast=autocast)
        assert_sound(pooling, x)
        assert_sound(pooling, x, torch.rand(2, 7) + 0.1)


@sides
@normalizations
@pytest.mark.parametrize("exponent", range(-12, 13, 4))
def test_every_scale(exponent: int, side: str, normalization: str) -> None:
    x = torch.randn(2, 6, 5) * 10.0**exponent
    assert_sound(Pooling(normalization=normalization, side=side), x)
    assert_sound(Pooling(normalization=normalization, side=side), x, torch.tensor([[1.0, 0, 2, 0, 1]] * 2))


@sides
@normalizations
@pytest.mark.parametrize("size", [1e-38, 1e-40, 1e-45])
def test_subnormal_numbers(size: float, side: str, normalization: str) -> None:
    """The reciprocal of a subnormal number is infinite. Such images count as zero, others do not."""
    x = torch.stack([torch.rand(4, 6) * size, torch.randn(4, 6)])
    c, (grad,) = Pooling(normalization=normalization, side=side).value_and_gradients(
        x, None, torch.ones(2, 4, 4)
    )
    assert torch.equal(c[0], torch.zeros(4, 4))
    assert torch.equal(grad[0], torch.zeros(4, 6))
    assert c[1].abs().max() > 0
    for root in (matrix_sqrt, inverse_matrix_sqrt):
        for compensation in ("matched", "none"):
            a = (torch.eye(3) * size).requires_grad_()
            result = root(a, normalization=normalization, compensation=compensation)
            result.sum().backward()
            assert torch.equal(result, torch.zeros(3, 3))
            assert a.grad is not None
            assert torch.equal(a.grad, torch.zeros(3, 3))


@sides
@normalizations
@pytest.mark.parametrize(("c", "n"), [(1, 1), (1, 6), (6, 1), (2, 1), (1, 2)])
def test_one_channel_or_one_position(c: int, n: int, side: str, normalization: str) -> None:
    x = torch.randn(2, c, n)
    assert_sound(Pooling(normalization=normalization, side=side), x)
    if n == 1:
        assert torch.equal(isqrt_cov(x, side=side, normalization=normalization), torch.zeros(2, c, c))


@sides
@normalizations
@pytest.mark.parametrize("compensation", ["matched", "none"])
@pytest.mark.parametrize("n", [1, 3, 49])
def test_constant_map_is_zero(side: str, normalization: str, compensation: str, n: int) -> None:
    """The result and its gradient are exactly zero. 0.1 - mean(0.1) is rounding; its root would be noise."""
    pooling = Pooling(normalization=normalization, compensation=compensation, side=side)
    values = [0.0, *CONSTANTS, 1e12, 1e-12]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.stack([torch.full((4, n), value, dtype=dtype) for value in values])
        for weights in (None, torch.rand(len(values), n) + 0.1):
            c, grads = pooling.value_and_gradients(x, weights, torch.ones(len(values), 4, 4))
            assert torch.equal(c, torch.zeros_like(c))
            for grad in grads:
                assert torch.equal(grad, torch.zeros_like(grad))


@sides
@normalizations
@pytest.mark.parametrize("compensation", ["matched", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e12])
def test_constant_map_has_zero_tangent(
    side: str, normalization: str, compensation: str, weighted: bool, value: float
) -> None:
    """The same holds in forward mode, where the derivative at zero can also become NaN."""
    x = torch.full((2, 3, 5), value)
    x[1] = torch.randn(3, 5)
    weights = torch.tensor([[1.0, 0, 2, 3, 1]] * 2) if weighted else None

    def f(x: Tensor) -> Tensor:
        return isqrt_cov(
            x, side=side, normalization=normalization, compensation=compensation, weights=weights
        )

    c, tangent = torch.func.jvp(f, (x,), (torch.randn(2, 3, 5),))
    assert torch.equal(c[0], torch.zeros(3, 3))
    assert torch.equal(tangent[0], torch.zeros(3, 3))
    assert tangent.isfinite().all()
    assert tangent[1].abs().max() > 0


@sides
@pytest.mark.parametrize("value", [0.1, 7.7, -3.3])
@pytest.mark.parametrize(("units", "alive"), [(1, False), (3, False), (8, True), (30, True)])
def test_the_flat_rule(side: str, value: float, units: int, alive: bool) -> None:
    """Up to four rounding units of noise count as flat. Larger noise is signal and is pooled accurately."""
    x = torch.full((1, 3, 6), value)
    x[:, 1, ::2] *= 1 + units * 2.0**-23
    c = isqrt_cov(x, side=side)
    assert bool(c[0, 1, 1] > 0) is alive
    assert torch.equal(c[0, 0], torch.zeros(3))
    assert_sound(Pooling(side=side), x)


@sides
@normalizations
@pytest.mark.parametrize("weighted", [False, True])
def test_one_live_channel_beside_a_large_flat_one(side: str, normalization: str, weighted: bool) -> None:
    """Without compensation C is 1 for every x, so the gradient is only rounding of the live channel."""
    units = torch.tensor([[0.0, 1, 3, 10, 2], [0, 1, 2, 3, 0]])
    x = (torch.tensor([[1e-6], [-33.0]]) * (1 + units * 2.0**-23))[None]
    weights = torch.tensor([[0.0, 0.9843, 0.0, 0.0544, 0.0]]) if weighted else None
    for compensation in ("matched", "none"):
        assert_sound(Pooling(normalization=normalization, compensation=compensation, side=side), x, weights)


@fuzz
@given(
    root=st.sampled_from([matrix_sqrt, inverse_matrix_sqrt]),
    normalization=st.sampled_from(NORMALIZATIONS),
    compensation=st.sampled_from(["matched", "none"]),
    steps=st.integers(1, 7) | st.just(UNEVEN),
    m=st.integers(1, 6),
    rank=st.integers(0, 6),
    exponent=st.integers(-24, 24),
    seed=st.integers(0, 2**31),
    autocast=st.booleans(),
)
@example(matrix_sqrt, "frobenius", "matched", 5, 4, 4, 24, 0, False)  # its square overflows float32
@example(matrix_sqrt, "frobenius", "matched", 5, 4, 4, -24, 0, False)  # its square underflows
def test_roots_of_any_matrix(
    root: Callable[..., Tensor],
    normalization: str,
    compensation: str,
    steps: paper.Steps,
    m: int,
    rank: int,
    exponent: int,
    seed: int,
    autocast: bool,
) -> None:
    """Any rank, including zero, and any scale that a covariance of features up to 1e12 can have."""
    if root is inverse_matrix_sqrt:
        exponent //= 2  # its true gradient grows as the scale to the power −3/2
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(2, m, rank, generator=generator, dtype=torch.float64)
    a = (half @ half.mT * 10.0**exponent).float()
    leaf = a.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = root(leaf, **chosen(steps), normalization=normalization, compensation=compensation)
        (grad,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
    assert result.dtype == torch.float32
    assert result.isfinite().all()
    assert grad.isfinite().all()
    if rank == 0:
        assert torch.equal(result, torch.zeros_like(result))
        assert torch.equal(grad, torch.zeros_like(grad))
        return
    plain = paper.matrix_sqrt if root is matrix_sqrt else paper.inverse_matrix_sqrt
    assert_near(result.detach(), plain(a.double(), steps, normalization, compensation), VALUE_TOLERANCE)


@fuzz
@given(inputs())
def test_covariance_of_any_input(features: tuple[Tensor, Tensor | None]) -> None:
    x, weights = features
    leaf = x.clone().requires_grad_()
    sigma = covariance(leaf, weights=weights)
    (grad,) = torch.autograd.grad(sigma, leaf, torch.ones_like(sigma))
    assert sigma.isfinite().all()
    if x.dtype != torch.float16:  # the range of float16 ends at 65504
        assert grad.isfinite().all()
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    flat = paper.flat_channels(x.to(compute_dtype), weights, compute_dtype)
    w = torch.ones(x.shape[0], x.shape[-1]) if weights is None else weights
    for i, actual in enumerate(sigma.detach()):
        live = (x[i].double() - x[i, :, :1].double()).masked_fill(flat[i], 0.0)
        if flat[i].all():
            assert torch.equal(actual, torch.zeros_like(actual))
        else:
            assert_near(actual[None], paper.weighted_covariance(live, w[i].double())[None], VALUE_TOLERANCE)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Return the same values in other memory layouts."""
    batch, channels, positions = x.shape
    wide = torch.empty(batch, channels, 2 * positions)
    wide[..., ::2] = x
    stored = torch.empty(positions, batch, channels)
    stored.copy_(x.permute(2, 0, 1))
    return {
        "tokens": x.mT.contiguous().mT,
        "every second": wide[..., ::2],
        "batch in the middle": stored.permute(1, 2, 0),
        "channels last": x.reshape(batch, channels, positions, 1)
        .contiguous(memory_format=torch.channels_last)
        .flatten(-2),
    }


@sides
@pytest.mark.parametrize("layout", ["tokens", "every second", "batch in the middle", "channels last"])
@pytest.mark.parametrize("backward", ["saved", "recompute"])
def test_layout_in_memory_does_not_matter(side: str, layout: str, backward: str) -> None:
    x, upstream = torch.randn(3, 5, 8), torch.randn(3, 5, 5)
    results = []
    for leaf in (x.clone().requires_grad_(), layouts(x)[layout].detach().requires_grad_()):
        c = isqrt_cov(leaf, side=side, backward=backward)
        # The upstream gradient may also be transposed or expanded in memory.
        (grad,) = torch.autograd.grad(c, leaf, upstream.mT.contiguous().mT)
        results.append((c.detach(), grad))
    for plain, other in zip(*results, strict=True):
        assert_near(other, plain.double(), 1e-5)


def test_expanded_input() -> None:
    """One image is expanded to three: no row may write into the memory of another."""
    image = torch.randn(4, 6, requires_grad=True)
    c = isqrt_cov(image.expand(3, 4, 6))
    c.sum().backward()
    alone = image.detach().clone().requires_grad_()
    isqrt_cov(alone).sum().backward()
    assert image.grad is not None
    assert alone.grad is not None
    assert_near(image.grad[None], 3 * alone.grad[None].double(), 1e-5)


@sides
@pytest.mark.parametrize("weighted", [False, True])
def test_batch_of_no_images(side: str, weighted: bool) -> None:
    x = torch.zeros(0, 4, 6, requires_grad=True)
    c = isqrt_cov(x, side=side, weights=torch.zeros(0, 6) if weighted else None)
    assert c.shape == (0, 4, 4)
    (grad,) = torch.autograd.grad(c.sum(), x)
    assert grad.shape == (0, 4, 6)
