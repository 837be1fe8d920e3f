"""``covpool.functional.isqrt_cov`` in the ways it can be called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covpool.bench.contenders.contender import Contender, Prepared, prepared_pool
from covpool.bench.problem import Problem
from covpool.functional import isqrt_cov


def _prepare(problem: Problem, **options: Any) -> Prepared:
    return prepared_pool(partial(isqrt_cov, steps=problem.steps, **options), problem)


def _prepare_compiled(problem: Problem) -> Prepared:
    # What is compiled for earlier sizes counts towards dynamo's limit of recompilations.
    torch.compiler.reset()

    def pool(x: Tensor) -> Tensor:
        return isqrt_cov(x, steps=problem.steps)

    compiled: Callable[[Tensor], Tensor] = torch.compile(pool, fullgraph=True, dynamic=False)
    return prepared_pool(compiled, problem)


OURS = Contender("ours", "isqrt_cov, as it is called by default", _prepare, same_iteration=True)
RECOMPUTE = Contender(
    "recompute",
    'isqrt_cov(backward="recompute")',
    partial(_prepare, backward="recompute"),
    same_iteration=True,
)
BFLOAT16 = Contender(
    "bfloat16",
    "isqrt_cov(compute_dtype=torch.bfloat16)",
    partial(_prepare, compute_dtype=torch.bfloat16),
    same_iteration=True,
)
COMPILED = Contender(
    "compiled",
    "torch.compile(isqrt_cov, fullgraph=True)",
    _prepare_compiled,
    same_iteration=True,
    dispatches_products=False,
)
