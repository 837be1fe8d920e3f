"""The number of matrix products. Products dominate the cost, so their number is fixed by tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from covpool.functional import covariance, inverse_matrix_sqrt, isqrt_cov, matrix_sqrt
from covpool.functional.newton_schulz import FITTED_STEPS
from tests.functional import paper
from tests.functional.counting import count_value_and_gradient, product_operands
from tests.functional.samples import chosen

STEPS = range(2, 8)
ROOTS = [matrix_sqrt, inverse_matrix_sqrt]
MATRIX = torch.eye(4).expand(2, 4, 4) + 0.1
FEATURES = torch.randn(2, 4, 3)
EXTRA = {"channels": (1, 1), "positions": (3, 4)}  # products outside the iteration: value, gradient


def products(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, int]:
    value, gradient = count_value_and_gradient(function, x)
    return value.count, gradient.count


def test_the_counter_counts() -> None:
    """The counter counts every form of a matrix product, and no elementwise product."""
    assert products(lambda a: paper.newton_schulz(a, 2)[0][-1], MATRIX)[0] == 8
    assert products(lambda a: a @ a, MATRIX) == (1, 2)
    assert products(lambda a: torch.einsum("bij,bjk->bik", a, a), MATRIX) == (1, 2)
    assert products(lambda a: torch.baddbmm(a, a, a), MATRIX) == (1, 2)
    assert products(lambda a: a.clone().baddbmm_(a, a), MATRIX) == (1, 2)
    assert products(lambda a: a * a, MATRIX) == (0, 0)


@pytest.mark.parametrize("root", ROOTS)
def test_five_steps(root: Callable[..., Tensor]) -> None:
    """12 products forward and 16 backward. The usual code takes 12 and 38."""
    assert products(partial(root, iteration="paper"), MATRIX) == (12, 16)


@pytest.mark.parametrize("side", EXTRA)
def test_five_steps_of_isqrt_cov(side: str) -> None:
    more, more_back = EXTRA[side]
    assert products(partial(isqrt_cov, iteration="paper", side=side), FEATURES) == (12 + more, 16 + more_back)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("steps", STEPS)
def test_any_number_of_steps(root: Callable[..., Tensor], normalization: str, steps: int) -> None:
    f = partial(root, **chosen(steps), normalization=normalization)
    assert products(f, MATRIX) == (3 * steps - 3, 4 * steps - 4)


@pytest.mark.parametrize("side", EXTRA)
@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("steps", STEPS)
def test_any_number_of_steps_of_isqrt_cov(side: str, normalization: str, steps: int) -> None:
    more, more_back = EXTRA[side]
    f = partial(isqrt_cov, **chosen(steps), normalization=normalization, side=side)
    assert products(f, FEATURES) == (3 * steps - 3 + more, 4 * steps - 4 + more_back)


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("side", EXTRA)
def test_fitted_steps(side: str, steps: int) -> None:
    """6 products forward and 8 backward for three steps, 9 and 12 for four."""
    expected = {3: (6, 8), 4: (9, 12)}[steps]
    for root in ROOTS:
        assert products(partial(root, steps=steps), MATRIX) == expected
    more, more_back = EXTRA[side]
    f = partial(isqrt_cov, side=side, steps=steps)
    assert products(f, FEATURES) == (expected[0] + more, expected[1] + more_back)
    if steps == FITTED_STEPS:
        assert products(partial(isqrt_cov, side=side), FEATURES) == products(f, FEATURES)


def test_one_step() -> None:
    """Y₁ = ½A(3I − A) takes one product forward and one backward; Z₁ = ½(3I − A) takes none."""
    assert products(partial(matrix_sqrt, **chosen(1)), MATRIX) == (1, 1)
    assert products(partial(inverse_matrix_sqrt, **chosen(1)), MATRIX) == (0, 0)


@pytest.mark.parametrize("root", ROOTS)
def test_recompute_adds_the_value_once_more(root: Callable[..., Tensor]) -> None:
    assert products(partial(root, backward="recompute"), MATRIX) == (6, 8 + 6)


@pytest.mark.parametrize("side", EXTRA)
def test_recompute_of_isqrt_cov_runs_the_iteration_once_more(side: str) -> None:
    """Backward recomputes the Gram matrix and the iteration, but not the final result."""
    value, gradient = products(partial(isqrt_cov, side=side), FEATURES)
    again = products(partial(isqrt_cov, side=side, backward="recompute"), FEATURES)
    assert again == (value, gradient + 6 + 1)


@pytest.mark.parametrize("side", EXTRA)
def test_weights_cost_no_product(side: str) -> None:
    plain = products(partial(isqrt_cov, side=side), FEATURES)
    assert products(partial(isqrt_cov, side=side, weights=torch.ones(2, 3)), FEATURES) == plain


def test_covariance() -> None:
    assert products(covariance, FEATURES) == (1, 2)


COMPILED = [
    pytest.param(matrix_sqrt, MATRIX, id="matrix_sqrt"),
    pytest.param(
        partial(isqrt_cov, side="channels", iteration="paper"),
        FEATURES,
        id="channels",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        partial(isqrt_cov, side="positions", iteration="paper"),
        FEATURES,
        id="positions",
        marks=pytest.mark.slow,
    ),
    pytest.param(partial(isqrt_cov, side="positions"), FEATURES, id="fitted"),
    pytest.param(inverse_matrix_sqrt, MATRIX, id="inverse", marks=pytest.mark.slow),
    pytest.param(partial(isqrt_cov, backward="recompute"), FEATURES, id="recompute", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("function", "x"), COMPILED)
def test_compiled_graph_has_no_more_products(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Count the products in the graphs that torch.compile passes to its backend."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(sum(product_operands(node.target) is not None for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiled = torch.compile(
        function, fullgraph=True, backend=aot_autograd(fw_compiler=count, bw_compiler=count)
    )
    leaf = x.clone().requires_grad_()
    compiled(leaf).sum().backward()
    eager = products(function, x)
    assert len(counts) == 2
    assert 0 < counts[0] <= eager[0]
    assert 0 < counts[1] <= eager[1]
