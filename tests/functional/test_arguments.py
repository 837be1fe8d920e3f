"""Errors for wrong arguments name the argument, show the received value and say how to fix it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from covpool.functional import (
    covariance,
    inverse_matrix_sqrt,
    isqrt_cov,
    matrix_sqrt,
    triu_unvec,
    triu_vec,
)

X = torch.ones(2, 3, 4)
A = torch.eye(3).expand(2, 3, 3)

FEATURES = [covariance, isqrt_cov]
ROOTS = [matrix_sqrt, inverse_matrix_sqrt]
of_features = pytest.mark.parametrize("f", FEATURES)
of_matrices = pytest.mark.parametrize("f", [*ROOTS, triu_vec])
with_steps = pytest.mark.parametrize(("f", "x"), [(isqrt_cov, X), *((root, A) for root in ROOTS)])

Operator = Callable[..., Any]


def refuses(error: type[Exception], *parts: str) -> Any:
    """Expect the error, with all these parts in its message, in this order."""
    return pytest.raises(error, match=r"(?s)^" + ".*".join(re.escape(part) for part in parts))


@of_features
@pytest.mark.parametrize("x", [[[1.0, 2.0]], None, 3.0])
def test_features_that_are_no_tensor(f: Operator, x: Any) -> None:
    with refuses(TypeError, "x must be a torch.Tensor", f"got {type(x).__name__}"):
        f(x)


@of_features
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_features_that_are_not_real_numbers(f: Operator, dtype: torch.dtype) -> None:
    with refuses(TypeError, "x must be a real floating-point tensor", str(dtype), "x.float()"):
        f(X.to(dtype))


@of_features
@pytest.mark.parametrize("shape", [(), (5,)])
def test_features_with_too_few_dimensions(f: Operator, shape: tuple[int, ...]) -> None:
    with refuses(ValueError, "x must be (..., C, n)", f"got shape {shape}", "x.flatten(-2)", "x.mT"):
        f(torch.ones(shape))


@of_features
@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 3, 0), (0, 0)])
def test_features_without_channels_or_positions(f: Operator, shape: tuple[int, ...]) -> None:
    with refuses(ValueError, "x must have at least one channel and one position", f"got {shape}"):
        f(torch.ones(shape))


@of_matrices
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 0, 0)])
def test_matrices_that_are_not_square(f: Operator, shape: tuple[int, ...]) -> None:
    name = "c" if f is triu_vec else "a"
    with refuses(
        ValueError,
        f"{name} must be square matrices (..., m, m)",
        f"got shape {shape}",
        "functional.covariance",
    ):
        f(torch.ones(shape))


@of_matrices
def test_matrices_of_another_type(f: Operator) -> None:
    name = "c" if f is triu_vec else "a"
    with refuses(TypeError, f"{name} must be a torch.Tensor", "got list", f"pass torch.stack({name})"):
        f([[1.0]])
    with refuses(TypeError, f"{name} must be a real floating-point tensor", "torch.int64", f"{name}.float()"):
        f(torch.eye(3).long())


def test_vector_of_another_type() -> None:
    with refuses(TypeError, "v must be a torch.Tensor", "got list"):
        triu_unvec([1.0])
    with refuses(TypeError, "v must be a real floating-point tensor", "torch.int64", "v.float()"):
        triu_unvec(torch.arange(6))
    with refuses(ValueError, "v must have d(d+1)/2 entries", "got 0"):
        triu_unvec(torch.tensor(1.0))


@with_steps
@pytest.mark.parametrize("steps", [5.0, "5", True, torch.tensor(5), ((1.5, -0.5),)])
def test_steps_of_another_type(f: Operator, x: torch.Tensor, steps: Any) -> None:
    with refuses(TypeError, "steps must be an int", f"got {type(steps).__name__}"):
        f(x, steps=steps)


@with_steps
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_fitted_steps_that_do_not_exist(f: Operator, x: torch.Tensor, steps: int) -> None:
    with refuses(ValueError, "steps must be 3 or 4", f"got {steps}", 'pass iteration="paper"'):
        f(x, steps=steps)


@with_steps
@pytest.mark.parametrize("steps", [0, -1])
def test_too_few_steps(f: Operator, x: torch.Tensor, steps: int) -> None:
    with refuses(ValueError, "steps must be at least 1", f"got {steps}"):
        f(x, steps=steps)


@with_steps
def test_more_steps_than_the_precision_can_bear(f: Operator, x: torch.Tensor) -> None:
    """In float32, 30 steps return NaN for wide features, and 20 give a gradient with percent-level errors."""
    for dtype, most in ((torch.float16, 15), (torch.float32, 15), (torch.float64, 40)):
        with refuses(ValueError, f"steps must be at most {most} in float", f"got {most + 1}"):
            f(x.to(dtype), iteration="paper", steps=most + 1)
        f(x.to(dtype), iteration="paper", steps=most)


def test_more_steps_than_half_precision_can_bear() -> None:
    for dtype, most in ((torch.bfloat16, 8), (torch.float16, 10)):
        with refuses(ValueError, f"steps must be at most {most} in", f"got {most + 1}"):
            isqrt_cov(X, iteration="paper", steps=most + 1, compute_dtype=dtype)


@with_steps
@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("normalization", "fro", ("'trace'", "'frobenius'")),
        ("normalization", None, ("'trace'", "'frobenius'")),
        ("compensation", "batchnorm", ("'matched'", "'none'")),  # nn supports it, functional does not
        ("compensation", None, ("'matched'", "'none'")),
        ("backward", "checkpoint", ("'saved'", "'recompute'")),
        ("backward", ["saved"], ("'saved'", "'recompute'")),
    ],
)
def test_unknown_choice(
    f: Operator, x: torch.Tensor, name: str, value: Any, choices: tuple[str, ...]
) -> None:
    with refuses(ValueError, f"{name} must be one of", *choices, f"got {value!r}"):
        f(x, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("side", "rows", ("'auto'", "'channels'", "'positions'")),
        ("compute_dtype", torch.float64, ("None", "torch.bfloat16")),
        ("compute_dtype", "bfloat16", ("None", "torch.bfloat16")),
    ],
)
def test_unknown_choice_of_isqrt_cov(name: str, value: Any, choices: tuple[str, ...]) -> None:
    with refuses(ValueError, f"{name} must be one of", *choices, f"got {value!r}"):
        isqrt_cov(X, **{name: value})


@of_features
@pytest.mark.parametrize("weights", [[1.0] * 4, 1.0])
def test_weights_that_are_no_tensor(f: Operator, weights: Any) -> None:
    with refuses(TypeError, "weights must be a torch.Tensor", f"got {type(weights).__name__}"):
        f(X, weights=weights)


@of_features
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64])
def test_weights_that_are_neither_mask_nor_numbers(f: Operator, dtype: torch.dtype) -> None:
    with refuses(TypeError, "weights must be bool or floating point", str(dtype), "weights.bool()"):
        f(X, weights=torch.ones(2, 4, dtype=dtype))


@of_features
@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((4,), ": use weights.expand(...)"),
        ((1, 4), ": use weights.expand(...)"),
        ((2, 1, 4), ": use weights.squeeze(1)"),
        ((2, 3), ""),
        ((2, 3, 4), ""),
        ((), ""),
    ],
)
def test_weights_of_another_shape(f: Operator, shape: tuple[int, ...], advice: str) -> None:
    with refuses(ValueError, "weights must be (2, 4)", "x (2, 3, 4)", f"got shape {shape}{advice}"):
        f(X, weights=torch.ones(shape))


@of_features
def test_weights_on_another_device(f: Operator) -> None:
    with refuses(ValueError, "weights is on meta but x is on cpu", "move one of them"):
        f(X, weights=torch.ones(2, 4, device="meta"))


@pytest.mark.parametrize("f", [*FEATURES, *ROOTS])
def test_options_are_by_name(f: Operator) -> None:
    """Positional options would fix their order forever."""
    with pytest.raises(TypeError, match="positional"):
        f(A, None)
