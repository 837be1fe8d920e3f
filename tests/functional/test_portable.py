"""The operators under torch.compile, torch.export, ONNX Runtime, torch.func and checkpointing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from covpool.functional import (
    covariance,
    inverse_matrix_sqrt,
    isqrt_cov,
    matrix_sqrt,
    triu_unvec,
    triu_vec,
)
from tests.functional.paper import Steps
from tests.functional.portability import (
    Function,
    check_compiled,
    check_exported,
    check_onnx,
    value_and_gradients,
)
from tests.functional.samples import UNEVEN, chosen
from tests.functional.tolerances import assert_close

# torch's own code raises these warnings during tracing and code generation.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def of_products(operator: Function, **options: object) -> Function:
    """Return a function that applies a matrix operator to products of features."""
    return lambda x: operator(x @ x.mT / x.shape[-1], **options)


def weighted(operator: Function, **options: object) -> Function:
    return lambda x, weights: operator(x, weights=weights, **options)


OPERATORS: dict[str, Function] = {
    "covariance": covariance,
    "matrix_sqrt": of_products(matrix_sqrt),
    "matrix_sqrt, frobenius, recompute": of_products(
        matrix_sqrt, normalization="frobenius", backward="recompute"
    ),
    "inverse_matrix_sqrt": of_products(inverse_matrix_sqrt),
    "isqrt_cov, channels": partial(isqrt_cov, side="channels"),
    "isqrt_cov, positions": partial(isqrt_cov, side="positions", iteration="paper"),
    "isqrt_cov, positions, frobenius, recompute": partial(
        isqrt_cov, side="positions", normalization="frobenius", backward="recompute"
    ),
    "isqrt_cov, positions, fitted": partial(isqrt_cov, side="positions"),
    "isqrt_cov, one step, not compensated": partial(isqrt_cov, **chosen(1), compensation="none"),
}
SIDES = ("channels", "positions")


def sizes(*shapes: tuple[int, int, int]) -> list[tuple[Tensor]]:
    """Return features of each shape. The first image of each is constant, where the result is zero."""
    inputs = []
    for shape in shapes:
        x = torch.randn(shape)
        x[0] = 7.7
        inputs.append((x,))
    return inputs


def both_sides(x: Tensor) -> Tensor:
    """Compute both sides in one graph."""
    return torch.stack([isqrt_cov(x, side="channels"), isqrt_cov(x, side="positions")])


def named(*fast: str) -> pytest.MarkDecorator:
    """Parametrize over all operators. Only the given ones are fast, because each takes seconds."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in OPERATORS]
    )


# torch.compile.


@named("isqrt_cov, positions, fitted")
def test_traces_whole_and_dynamic(name: str) -> None:
    check_compiled(OPERATORS[name], "aot_eager", *sizes((3, 12, 9), (5, 14, 11)))


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_weights_trace_whole_and_dynamic(side: str) -> None:
    inputs = [(torch.randn(b, c, n), torch.rand(b, n)) for b, c, n in ((3, 12, 9), (5, 14, 11))]
    check_compiled(weighted(isqrt_cov, side=side), "aot_eager", *inputs)


# The C++ compiler takes 40 s per operator. The graphs themselves are compared above.
@named()
def test_compiled_by_inductor(name: str) -> None:
    check_compiled(OPERATORS[name], "inductor", *sizes((3, 12, 9), (5, 14, 11)))


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_weights_compiled_by_inductor(side: str, kind: str) -> None:
    inputs = []
    for b, c, n in ((3, 12, 9), (5, 14, 11)):
        weights = torch.rand(b, n) if kind == "float" else torch.rand(b, n) > 0.3
        inputs.append((torch.randn(b, c, n), weights))
    check_compiled(weighted(isqrt_cov, side=side), "inductor", *inputs)


@pytest.mark.slow
def test_the_side_is_chosen_anew_for_another_size() -> None:
    # One callable for both sizes. A size that needs the other side is recompiled.
    torch.compiler.reset()
    compiled = torch.compile(isqrt_cov, fullgraph=True, dynamic=True)
    for shape in ((3, 24, 6), (3, 8, 40)):
        x = torch.randn(shape)
        for a, b in zip(
            value_and_gradients(compiled, (x,)), value_and_gradients(isqrt_cov, (x,)), strict=True
        ):
            assert_close(a, b, relative=1e-5)


@pytest.mark.slow
def test_two_calls_in_one_graph() -> None:
    def function(x: Tensor) -> Tensor:
        one = isqrt_cov(x, side="positions", normalization="frobenius", backward="recompute")
        two = matrix_sqrt(covariance(2 * x), steps=4) + isqrt_cov(x * x, steps=4)
        return one + two + covariance(3 * x)

    check_compiled(function, "aot_eager", *sizes((3, 12, 9), (5, 14, 11)))


@pytest.mark.slow
def test_triangles_trace_whole() -> None:
    # The matrix size is a constant of the graph: torch.triu_indices does not accept a symbolic size.
    check_compiled(
        lambda c: triu_unvec(triu_vec(c)), "aot_eager", *((torch.randn(b, 12, 12),) for b in (3, 5))
    )


@pytest.mark.slow
def test_compiled_without_gradient() -> None:
    torch.compiler.reset()
    compiled = torch.compile(both_sides, fullgraph=True, dynamic=True, backend="aot_eager")
    (x,) = sizes((3, 12, 9))[0]
    with torch.no_grad():
        assert_close(compiled(x), both_sides(x), relative=1e-5)


@pytest.mark.slow
def test_compiled_under_autocast() -> None:
    torch.compiler.reset()
    compiled = torch.compile(both_sides, fullgraph=True, dynamic=True, backend="aot_eager")
    (x,) = sizes((3, 12, 9))[0]
    expected = value_and_gradients(both_sides, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(value_and_gradients(compiled, (x,)), expected, strict=True):
            assert_close(a, b, relative=1e-5)


# torch.export and ONNX.


class Apply(nn.Module):
    """Wrap a function as a module, as exporters require."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.function(x) if weights is None else self.function(x, weights)


@named("matrix_sqrt", "isqrt_cov, channels", "isqrt_cov, positions, fitted")
def test_exported_with_a_dynamic_batch(name: str) -> None:
    example, other = sizes((3, 12, 9), (5, 12, 9))
    check_exported(Apply(OPERATORS[name]), example, [other, (torch.randn(1, 12, 9),)])


@named("isqrt_cov, positions, fitted")
def test_onnx_with_a_dynamic_batch(name: str, tmp_path: Path) -> None:
    example, other = sizes((3, 12, 9), (5, 12, 9))
    check_onnx(Apply(OPERATORS[name]), tmp_path / "operator.onnx", example, [other, (torch.randn(1, 12, 9),)])


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_onnx_with_weights(side: str, tmp_path: Path) -> None:
    example, *others = [(torch.randn(b, 12, 9), torch.rand(b, 9)) for b in (3, 1, 5)]
    check_onnx(Apply(weighted(isqrt_cov, side=side)), tmp_path / "weighted.onnx", example, others)


# torch.func.


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("steps", [5, UNEVEN], ids=["paper", "fitted"])
def test_vmap_is_a_batch(side: str, in_dim: int, steps: Steps) -> None:
    x = torch.randn(4, 3, 12, 9)
    function = partial(isqrt_cov, side=side, **chosen(steps))
    mapped = torch.func.vmap(function, in_dims=in_dim, out_dims=in_dim)(x)
    assert_close(mapped, function(x))


@pytest.mark.parametrize("operator", [matrix_sqrt, inverse_matrix_sqrt])
def test_vmap_of_roots_is_a_batch(operator: Function) -> None:
    a = covariance(torch.randn(4, 3, 6, 20))
    assert_close(torch.func.vmap(operator)(a), operator(a), relative=1e-4)


def test_vmap_over_weights_alone() -> None:
    x, weights = torch.randn(12, 9), torch.rand(4, 9)
    mapped = torch.func.vmap(lambda w: isqrt_cov(x, weights=w))(weights)
    assert_close(mapped, isqrt_cov(x.expand(4, 12, 9), weights=weights))


def test_vmap_of_triangles_is_a_batch() -> None:
    c = covariance(torch.randn(4, 3, 6, 20))
    assert torch.equal(torch.func.vmap(triu_vec)(c), triu_vec(c))
    assert torch.equal(torch.func.vmap(triu_unvec)(triu_vec(c)), c)


def loss(x: Tensor, operator: Function = isqrt_cov, **options: object) -> Tensor:
    """Return a scalar that depends differently on each entry of the result."""
    y = operator(x, **options)
    return (y * torch.sin(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)).sum() + y.square().sum()


@pytest.mark.parametrize("options", [{"side": "channels"}, {"side": "positions", "backward": "recompute"}])
def test_grad_and_gradients_of_each_sample(options: dict[str, str]) -> None:
    x = torch.randn(4, 12, 9)
    each = torch.func.vmap(torch.func.grad(partial(loss, **options)))(x)
    for i in range(4):
        leaf = x[i].clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf, **options), leaf)
        assert_close(each[i], expected)
        assert_close(torch.func.grad(partial(loss, **options))(x[i]), expected)


SMALL: dict[str, Function] = {
    "isqrt_cov, channels": partial(isqrt_cov, side="channels", steps=4),
    "isqrt_cov, positions": partial(isqrt_cov, side="positions", steps=4),
    "isqrt_cov, recompute": partial(isqrt_cov, side="positions", backward="recompute"),
    "matrix_sqrt": of_products(matrix_sqrt),
    "inverse_matrix_sqrt": of_products(inverse_matrix_sqrt, steps=4),
    "covariance": covariance,
}


@pytest.mark.parametrize("name", SMALL)
def test_jacobians_and_tangents_agree_and_are_true(name: str) -> None:
    function, x = SMALL[name], torch.randn(2, 4, 3, dtype=torch.float64)
    backward, forward = torch.func.jacrev(function)(x), torch.func.jacfwd(function)(x)
    assert_close(forward, backward)
    direction = torch.randn_like(x)
    value, tangent = torch.func.jvp(function, (x,), (direction,))
    assert_close(value, function(x))
    assert_close(tangent, torch.tensordot(backward, direction, 3))
    step = 1e-6 * direction
    assert_close(tangent, (function(x + step) - function(x - step)) / 2e-6, relative=1e-7)


@pytest.mark.parametrize("name", SMALL)
def test_hessian_is_the_derivative_of_the_gradient(name: str) -> None:
    function = partial(loss, operator=SMALL[name])
    x = torch.randn(4, 3, dtype=torch.float64)
    second = torch.func.hessian(function)(x).reshape(12, 12)
    assert_close(second, second.mT)
    assert_close(torch.func.jacrev(torch.func.jacrev(function))(x).reshape(12, 12), second)
    direction = torch.randn_like(x)
    step, gradient = 1e-6 * direction, torch.func.grad(function)
    slope = (gradient(x + step) - gradient(x - step)) / 2e-6
    assert_close((second @ direction.flatten()).reshape(4, 3), slope, relative=1e-6)


def test_tangent_of_weights() -> None:
    x, weights = torch.randn(2, 4, 6).double(), torch.rand(2, 6).double()
    direction = torch.randn_like(weights)

    def function(weights: Tensor) -> Tensor:
        return isqrt_cov(x, weights=weights)

    _, tangent = torch.func.jvp(function, (weights,), (direction,))
    step = 1e-6 * direction
    assert_close(tangent, (function(weights + step) - function(weights - step)) / 2e-6, relative=1e-7)


# Checkpointing and flags.


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_checkpoint_gives_the_same_gradient(side: str, use_reentrant: bool) -> None:
    function = partial(isqrt_cov, side=side)
    plain, again = (torch.randn(3, 12, 9, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    loss(plain.requires_grad_(), function).backward()
    loss(again.requires_grad_(), lambda x: checkpoint(function, x, use_reentrant=use_reentrant)).backward()
    assert plain.grad.any()
    assert torch.equal(again.grad, plain.grad)


def test_gradcheck_through_a_checkpoint() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: checkpoint(isqrt_cov, x, use_reentrant=False), x)


def flags() -> dict[str, object]:
    matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    return {
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "cuda matmul tf32": matmul.allow_tf32,
        "cuda reduced bf16": matmul.allow_bf16_reduced_precision_reduction,
        "cudnn tf32": cudnn.allow_tf32,
        "mkldnn matmul": mkldnn.matmul.fp32_precision,
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_no_global_flag_is_touched(precision: str) -> None:
    x = torch.randn(3, 12, 9)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        flags_before = flags()
        value_and_gradients(both_sides, (x,))
        value_and_gradients(partial(isqrt_cov, compute_dtype=torch.bfloat16), (x,))
        assert flags() == flags_before
    finally:
        torch.set_float32_matmul_precision(before)
