"""What every contender offers to the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from covpool.bench.problem import Problem

Measure = Literal["value", "value_and_gradient"]
MEASURES: tuple[Measure, ...] = ("value", "value_and_gradient")


@dataclass(frozen=True)
class Prepared:
    """A contender set up for one problem: two calls to time.

    ``pool`` is the contender as a differentiable function of the features; None for one that only
    stands for an amount of work.
    """

    value: Callable[[], object]
    value_and_gradient: Callable[[], object]
    pool: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Contender:
    """A way to compute the root of the covariance.

    Attributes:
        name: what results call it.
        summary: one line for readers of the results.
        prepare: sets it up for a problem; nothing done here is timed.
        same_iteration: whether it computes what ``isqrt_cov`` computes, so that its distance from
            the float64 result is rounding and not a different mathematics.
        dispatches_products: whether its products can be counted by watching torch's dispatcher.
    """

    name: str
    summary: str
    prepare: Callable[[Problem], Prepared]
    same_iteration: bool = False
    dispatches_products: bool = True


def prepared_pool(pool: Callable[[Tensor], Tensor], problem: Problem) -> Prepared:
    """Value and value+gradient of a differentiable function of the features."""
    return Prepared(
        value=partial(value_alone, pool, problem.features),
        value_and_gradient=partial(value_and_gradient, pool, problem.features, problem.upstream),
        pool=pool,
    )


def value_alone(pool: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """The result, with nothing kept for a gradient."""
    with torch.no_grad():
        return pool(features)


def value_and_gradient(
    pool: Callable[[Tensor], Tensor], features: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of ``⟨upstream, result⟩`` with respect to the features."""
    leaf = features.detach().requires_grad_()
    result = pool(leaf)
    (gradient,) = torch.autograd.grad(result, leaf, upstream)
    return result.detach(), gradient
