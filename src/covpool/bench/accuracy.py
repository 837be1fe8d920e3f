"""How far float32 and bfloat16 products take the result away from float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from covpool.bench.contenders.contender import value_and_gradient
from covpool.bench.problem import Problem
from covpool.functional import isqrt_cov


class Reference(NamedTuple):
    """``isqrt_cov`` in float64 on the same features."""

    value: Tensor
    gradient: Tensor


def float64_reference(problem: Problem) -> Reference:
    """Value and gradient that every contender's is compared with."""
    pool = partial(isqrt_cov, steps=problem.steps)
    return Reference(*value_and_gradient(pool, problem.features.double(), problem.upstream.double()))


def relative_errors(pool: Callable[[Tensor], Tensor], problem: Problem, exact: Reference) -> dict[str, float]:
    """Largest difference in the batch, relative to the largest entry, of value and gradient."""
    value, gradient = value_and_gradient(pool, problem.features, problem.upstream)
    return {
        "value": _relative_to_max(value, exact.value),
        "gradient": _relative_to_max(gradient, exact.gradient),
    }


def _relative_to_max(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max())
