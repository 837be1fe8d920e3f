"""Output dtypes, no effect of autocast, and no changes to global flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covpool.functional import covariance, isqrt_cov, matrix_sqrt
from covpool.functional.newton_schulz import MOST_STEPS
from tests.functional.pooling import DTYPES, SIDES, Pooling
from tests.functional.samples import chosen

sides = pytest.mark.parametrize("side", SIDES)


@sides
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_policy(side: str, dtype: torch.dtype, autocast: bool) -> None:
    """Half precision gives float32; float32 and float64 stay. Each gradient has the dtype of its input."""
    x = torch.randn(2, 4, 5).to(dtype)
    expected = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(2, 5) + 0.1
    for weights_dtype in DTYPES:
        c, grads = Pooling(side=side, autocast=autocast).value_and_gradients(
            x, weights.to(weights_dtype), torch.ones(2, 4, 4)
        )
        assert c.dtype == expected
        assert [grad.dtype for grad in grads] == [dtype, weights_dtype]


@sides
def test_autocast_changes_nothing(side: str) -> None:
    """Inside autocast the products still run in float32, forward and backward, with bit-identical results."""
    x, upstream = torch.randn(2, 4, 5), torch.randn(2, 4, 4)
    off = Pooling(side=side).value_and_gradients(x, None, upstream)
    on = Pooling(side=side, autocast=True).value_and_gradients(x, None, upstream)
    assert torch.equal(off[0], on[0])
    assert torch.equal(off[1][0], on[1][0])


def precision_flags() -> dict[str, Any]:
    """Return all global settings that affect how a product is computed."""
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "cuda": torch.backends.cuda.matmul.allow_tf32,
        "cuda fp16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cuda bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn": torch.backends.cudnn.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "denormal": torch.tensor(1e-40).mul(1.0).item(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16, torch.float16])
def test_no_global_flag_is_touched(
    compute_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags are the same afterwards, and their setters are never called."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a global flag was set")

    before = precision_flags()
    for setter in ("set_float32_matmul_precision", "use_deterministic_algorithms", "set_default_dtype"):
        monkeypatch.setattr(torch, setter, forbidden)
    x = torch.randn(2, 4, 5, requires_grad=True)
    isqrt_cov(x, compute_dtype=compute_dtype).sum().backward()
    matrix_sqrt(covariance(x)).sum().backward()
    assert precision_flags() == before


def test_shapes_on_the_meta_device() -> None:
    """Frameworks infer shapes on the meta device, where autocast does not exist."""
    x = torch.empty(2, 8, 5, device="meta", requires_grad=True)
    c = isqrt_cov(x)
    assert c.shape == (2, 8, 8)
    (grad,) = torch.autograd.grad(c.sum(), x)
    assert grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@sides
def test_rounding_at_the_largest_number_of_steps(side: str, dtype: torch.dtype) -> None:
    """On a singular covariance every step amplifies rounding errors."""
    limit = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 0.15}[dtype]
    torch.manual_seed(0)
    x = torch.randn(2, 64, 5, dtype=torch.float64) @ torch.randn(2, 5, 49, dtype=torch.float64)
    upstream = torch.randn(2, 64, 64, dtype=torch.float64)
    half = None if dtype == torch.float32 else dtype
    results = []
    for features, compute_dtype in ((x, None), (x.float(), half)):
        leaf = features.clone().requires_grad_()
        c = isqrt_cov(leaf, **chosen(MOST_STEPS[dtype]), side=side, compute_dtype=compute_dtype)
        (grad,) = torch.autograd.grad(c, leaf, upstream.to(c.dtype))
        results.append((c.detach().double(), grad.double()))
    for exact, rounded in zip(*results, strict=True):
        assert (rounded - exact).norm() < limit * exact.norm()
