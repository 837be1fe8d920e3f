"""The operators under torch.compile, torch.export, ONNX Runtime, torch.func and checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from covpool.functional import covariance, inverse_matrix_sqrt, isqrt_cov, matrix_sqrt, triu_unvec, triu_vec
from tests.functional.tolerances import assert_close

Operator = Callable[[Tensor], Tensor]

# Tracing and code generation warn of code of torch's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def of_covariance(operator: Operator, **options: object) -> Operator:
    """Features to an operator on matrices, through products alone."""
    return lambda x: operator(x @ x.mT / x.shape[-1], **options)


OPERATORS: dict[str, Operator] = {
    "covariance": covariance,
    "matrix_sqrt": of_covariance(matrix_sqrt),
    "matrix_sqrt frobenius recompute": of_covariance(
        matrix_sqrt, normalization="frobenius", backward="recompute"
    ),
    "inverse_matrix_sqrt": of_covariance(inverse_matrix_sqrt, steps=3),
    "isqrt_cov channels": partial(isqrt_cov, side="channels"),
    "isqrt_cov positions": partial(isqrt_cov, side="positions"),
    "isqrt_cov positions frobenius recompute": partial(
        isqrt_cov, side="positions", normalization="frobenius", backward="recompute"
    ),
    "isqrt_cov one step none": partial(isqrt_cov, side="positions", steps=1, compensation="none"),
    "triu": lambda x: triu_unvec(triu_vec(x @ x.mT)),
}
BOTH_SIDES = ("isqrt_cov channels", "isqrt_cov positions")


def both_sides(x: Tensor) -> Tensor:
    """Every kernel of the two sides in one graph, for compiling takes a second a kernel."""
    channels, positions = (OPERATORS[name](x) for name in BOTH_SIDES)
    return torch.stack([channels, positions])


def assert_same_value_and_gradient(one: Operator, other: Operator, *inputs: Tensor) -> None:
    results = []
    for function in (one, other):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        y = function(*leaves)
        upstream = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        results.append([y.detach(), *grad(y, wanted, upstream)])
    for a, b in zip(*results, strict=True):
        assert_close(a, b)


def check_compiled(function: Operator, backend: str) -> None:
    """One graph, forward and backward, that serves two sizes without being made again."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    assert_same_value_and_gradient(compiled, function, torch.randn(3, 12, 9))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same_value_and_gradient(compiled, function, torch.randn(5, 14, 11))


@pytest.mark.parametrize("name", OPERATORS)
def test_traces_whole_and_dynamic(name: str) -> None:
    check_compiled(OPERATORS[name], "aot_eager")


def test_compiled_by_inductor() -> None:
    check_compiled(both_sides, "inductor")
