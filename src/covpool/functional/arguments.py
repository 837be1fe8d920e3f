"""Check the arguments of public functions. Every message names the argument and says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from covpool.arguments import check_choice, check_whole
from covpool.errors import UsageError, UsageTypeError
from covpool.functional.newton_schulz import (
    FITTED_STEPS,
    ITERATIONS,
    PAPER_STEPS,
    Coefficients,
    fitted_steps,
    paper_steps,
)

# The most Newton-Schulz steps by the dtype of the iteration. Each step multiplies the rounding error of the
# gradient on the null space by up to 2.25. At these limits the gradient of a singular covariance is off by
# 7 %, 2.5 % and 0.1 %; the limit of float64 follows from the growth per step.
MOST_STEPS = {torch.bfloat16: 8, torch.float16: 10, torch.float32: 15, torch.float64: 40}


def check_steps(
    steps: object, dtype: torch.dtype = torch.float64, most: Mapping[torch.dtype, int] = MOST_STEPS
) -> None:
    """Raise unless ``steps`` is a whole number of at least one, and not more than ``dtype`` can bear.

    Where the dtype of the features is not known yet, that of the highest limit is assumed.
    """
    if isinstance(steps, int) and steps < 1:
        raise UsageError(f"steps must be at least 1 (the paper uses {PAPER_STEPS}); got {steps}")
    check_whole("steps", steps)
    assert isinstance(steps, int)
    if steps > most[dtype]:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(
            f"steps must be at most {most[dtype]} in {name}, because more steps amplify rounding errors; "
            f"got {steps} (the paper uses {PAPER_STEPS})"
        )


def step_coefficients(iteration: object, steps: int | None, dtype: torch.dtype) -> Coefficients:
    """Return ``(a, b)`` of every step. Raise unless the iteration has that number of steps.

    Args:
        iteration: ``"fitted"``, with 3 or 4 steps, or ``"paper"``, with any number.
        steps: K; ``None`` for the default of the iteration.
        dtype: the dtype of the iteration, which limits the number of steps.
    """
    check_choice("iteration", iteration, ITERATIONS)
    if steps is None:
        steps = FITTED_STEPS if iteration == "fitted" else PAPER_STEPS
    check_steps(steps, dtype)
    return fitted_steps(steps) if iteration == "fitted" else paper_steps(steps)


def check_floating(name: str, x: object) -> None:
    """Raise unless ``x`` is a real floating-point tensor."""
    if not isinstance(x, Tensor):
        raise UsageTypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if not x.is_floating_point() or x.dtype.itemsize < 2:  # float8 stores numbers, it does not compute
        raise UsageTypeError(
            f"{name} must be a real floating-point tensor; got {x.dtype}: pass {name}.float()"
        )


def check_features(x: Tensor) -> None:
    """Raise unless ``x`` is ``(..., C, n)`` with at least one channel and one position."""
    check_floating("x", x)
    if x.ndim < 2:
        raise UsageError(
            f"x must be (..., C, n), channels before positions; got shape {tuple(x.shape)}: "
            "flatten a feature map with x.flatten(-2), transpose tokens with x.mT"
        )
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        raise UsageError(
            f"x must have at least one channel and one position in (..., C, n); got {tuple(x.shape)}"
        )


def check_square(name: str, a: Tensor) -> None:
    """Raise unless ``a`` is ``(..., m, m)``."""
    check_floating(name, a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or a.shape[-1] == 0:
        raise UsageError(
            f"{name} must be square matrices (..., m, m); got shape {tuple(a.shape)}: "
            "covpool.functional.covariance makes them from features"
        )


def check_weights(weights: Tensor, x: Tensor) -> None:
    """Raise unless ``weights`` is bool or floating and ``(..., n)`` for ``x`` of ``(..., C, n)``.

    Values are not checked, because that would wait for the device: a negative weight gives NaN.
    """
    if not isinstance(weights, Tensor):
        raise UsageTypeError(f"weights must be a torch.Tensor; got {type(weights).__name__}")
    if weights.dtype != torch.bool and not weights.is_floating_point():
        raise UsageTypeError(
            f"weights must be bool or floating point; got {weights.dtype}: pass weights.bool() for a mask"
        )
    expected = (*x.shape[:-2], x.shape[-1])
    if tuple(weights.shape) != expected:
        raise UsageError(
            f"weights must be {expected}, one number for each position of x {tuple(x.shape)}; "
            f"got shape {tuple(weights.shape)}{weights_advice(weights, [expected])}"
        )
    if weights.device != x.device:
        raise UsageError(f"weights is on {weights.device} but x is on {x.device}: move one of them")


def weights_advice(weights: Tensor, accepted: Sequence[tuple[int, ...]]) -> str:
    """Return how to bring weights of another shape to an accepted one, after a colon; empty if unknown."""
    shape = tuple(weights.shape)
    if len(shape) > 1 and shape[1] == 1 and (shape[0], *shape[2:]) in accepted:
        return ": use weights.squeeze(1)"
    if any(shape in (full[1:], (1, *full[1:])) for full in accepted):
        return ": use weights.expand(...) to share one mask across the batch"
    return ""
