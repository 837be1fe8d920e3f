"""Features to normalized covariance: all derivatives, both sides, and the automatic choice of side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from covpool.functional import covariance, inverse_matrix_sqrt, isqrt_cov, matrix_sqrt, triu_vec
from covpool.functional.isqrt_cov import cheaper_side
from tests.functional import paper
from tests.functional.counting import count_value_and_gradient
from tests.functional.cover import grid
from tests.functional.samples import UNEVEN, chosen, features, positive_weights
from tests.functional.tolerances import assert_close

EVERY_OPTION = grid(
    {"steps": (1, 2, UNEVEN)},  # no step, one step and several steps between the first and the last
    steps=[*range(1, 8), UNEVEN],
    normalization=["trace", "frobenius"],
    compensation=["matched", "none"],
    backward=["saved", "recompute"],
    side=["channels", "positions"],
    weighted=[False, True],
)
SIDES = ["channels", "positions"]
sides = pytest.mark.parametrize("side", SIDES)
backwards = pytest.mark.parametrize("backward", ["saved", "recompute"])
shapes = pytest.mark.parametrize(("c", "n"), [(5, 9), (9, 5), (6, 6)])


def inputs(weighted: bool, batch: int, c: int, n: int) -> tuple[Tensor, ...]:
    """Return the tensors to differentiate: the features and, if ``weighted``, the weights."""
    x = features(batch, c, n).requires_grad_()
    return (x, positive_weights(batch, n).requires_grad_()) if weighted else (x,)


def operator(**options: object) -> Callable[..., Tensor]:
    """Return ``isqrt_cov`` with the weights as its second positional argument, for gradcheck."""

    def f(x: Tensor, weights: Tensor | None = None) -> Tensor:
        return isqrt_cov(x, weights=weights, **options)

    return f


def plain_operator(**options: object) -> Callable[..., Tensor]:
    """Return the paper's equations with the same signature."""

    def f(x: Tensor, weights: Tensor | None = None) -> Tensor:
        return paper.isqrt_cov(x, weights=weights, **options)

    return f


@EVERY_OPTION
def test_value(
    steps: paper.Steps, normalization: str, compensation: str, backward: str, side: str, weighted: bool
) -> None:
    for c, n in ((4, 6), (6, 4)):
        arguments = inputs(weighted, 2, c, n)
        options = {"normalization": normalization, "compensation": compensation}
        expected = plain_operator(steps=steps, **options)(*arguments).detach()
        f = operator(backward=backward, side=side, **chosen(steps), **options)
        assert_close(f(*arguments).detach(), expected)
        assert_close(f(*(argument.detach() for argument in arguments)), expected)


@EVERY_OPTION
def test_gradcheck(
    steps: paper.Steps, normalization: str, compensation: str, backward: str, side: str, weighted: bool
) -> None:
    """Check reverse and forward mode, also batched, for the features and the weights."""
    f = operator(
        **chosen(steps),
        normalization=normalization,
        compensation=compensation,
        backward=backward,
        side=side,
    )
    assert gradcheck(
        f,
        inputs(weighted, 2, *((3, 4) if steps in (1, UNEVEN) else (3, 2))),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@EVERY_OPTION
def test_gradgradcheck(
    steps: paper.Steps, normalization: str, compensation: str, backward: str, side: str, weighted: bool
) -> None:
    """Check reverse over reverse and forward over reverse."""
    f = operator(
        **chosen(steps),
        normalization=normalization,
        compensation=compensation,
        backward=backward,
        side=side,
    )
    arguments = inputs(weighted, 1, *((2, 3) if steps in (1, UNEVEN) else (3, 2)))
    assert gradgradcheck(f, arguments, check_fwd_over_rev=True, check_batched_grad=True)


@EVERY_OPTION
def test_double_backward_is_that_of_the_plain_equations(
    steps: paper.Steps, normalization: str, compensation: str, backward: str, side: str, weighted: bool
) -> None:
    """Iterates reused as constants would give a wrong second derivative without an error."""
    arguments = inputs(weighted, 2, 4, 3)
    grad = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    directions = [torch.randn_like(argument) for argument in arguments]

    def second(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(f(*arguments), arguments, grad, create_graph=True)
        return *first, *torch.autograd.grad(first, (*arguments, grad), directions)

    options = {"normalization": normalization, "compensation": compensation}
    actual = second(operator(backward=backward, side=side, **chosen(steps), **options))
    expected = second(plain_operator(steps=steps, **options))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.detach(), e.detach(), 1e-10)


@sides
@backwards
@pytest.mark.parametrize("weighted", [False, True])
def test_hessian_vector_product_is_the_same_by_every_route(side: str, backward: str, weighted: bool) -> None:
    """Forward over reverse must not treat the saved iterates as constants, with or without a graph."""
    x, direction = features(2, 4, 5), torch.randn(2, 4, 5, dtype=torch.float64)
    weights = positive_weights(2, 5) if weighted else None
    upstream = torch.randn(2, 4, 4, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        c = isqrt_cov(x, iteration="paper", side=side, backward=backward, weights=weights)
        return (c.sin() * upstream).sum()

    def plain(x: Tensor) -> Tensor:
        return (paper.isqrt_cov(x, weights=weights).sin() * upstream).sum()

    def reverse_over_reverse(f: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.autograd.grad(first, leaf, direction)[0]

    expected = reverse_over_reverse(plain)
    assert_close(reverse_over_reverse(f), expected, 1e-10)
    for create_graph in (False, True):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), direction)
            (first,) = torch.autograd.grad(f(dual), dual, create_graph=create_graph)
            tangent = forward_ad.unpack_dual(first).tangent
        assert tangent is not None
        assert_close(tangent.detach(), expected, 1e-10)
    assert_close(torch.func.jvp(torch.func.grad(f), (x,), (direction,))[1], expected, 1e-10)


@sides
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"steps": 4}, {"iteration": "paper"}, chosen(7)], ids=str)
def test_is_the_root_of_the_covariance(side: str, weighted: bool, options: dict[str, Any]) -> None:
    """The fused operator equals the composition of the two public ones, with equal arguments and defaults."""
    arguments = inputs(weighted, 2, 4, 6)
    weights = arguments[1] if weighted else None
    one = isqrt_cov(arguments[0], weights=weights, side=side, **options)
    two = matrix_sqrt(covariance(arguments[0], weights=weights), **options)
    upstream = torch.randn_like(one)
    assert_close(one.detach(), two.detach())
    grads = (torch.autograd.grad(result, arguments, upstream) for result in (one, two))
    for actual, expected in zip(*grads, strict=True):
        assert_close(actual, expected)


@shapes
@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("compensation", ["matched", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_both_sides_are_equal(
    c: int, n: int, normalization: str, compensation: str, weighted: bool, dtype: torch.dtype, relative: float
) -> None:
    """Value and gradient agree, to 1e-5 in float32, whichever side is smaller."""
    arguments = [t.detach().to(dtype).requires_grad_() for t in inputs(weighted, 3, c, n)]
    upstream = torch.randn(3, c, c, dtype=dtype)
    results, grads = [], []
    for side in SIDES:
        result = operator(side=side, normalization=normalization, compensation=compensation)(*arguments)
        results.append(result.detach())
        grads.append(torch.autograd.grad(result, arguments, upstream))
    assert_close(results[0], results[1], relative)
    for on_channels, on_positions in zip(*grads, strict=True):
        assert_close(on_channels, on_positions, relative)


@pytest.mark.parametrize(("c", "n"), [(64, 49), (48, 64)])
def test_both_sides_are_equal_at_the_size_of_real_features(c: int, n: int) -> None:
    """Compare both sides in float32 with float64, on ReLU features."""
    x = features(2, c, n, dtype=torch.float32).relu()
    upstream = torch.randn(2, c, c)
    leaf = x.double().requires_grad_()
    expected = paper.isqrt_cov(leaf)
    (expected_grad,) = torch.autograd.grad(expected, leaf, upstream.double())
    for side in SIDES:
        leaf = x.clone().requires_grad_()
        result = isqrt_cov(leaf, iteration="paper", side=side)
        (grad,) = torch.autograd.grad(result, leaf, upstream)
        assert_close(result.detach(), expected.detach().float())
        assert_close(grad, expected_grad.float())


@sides
@shapes
def test_equation_11(side: str, c: int, n: int) -> None:
    """∂l/∂X = (G + Gᵀ) X Ī: the paper's equation with its factors in the order that the shapes allow."""
    x = features(2, c, n).requires_grad_()
    upstream = torch.randn(2, c, c, dtype=torch.float64)
    sigma = paper.covariance(x.detach()).requires_grad_()
    (grad_sigma,) = torch.autograd.grad(paper.matrix_sqrt(sigma), sigma, upstream)
    (actual,) = torch.autograd.grad(isqrt_cov(x, iteration="paper", side=side), x, upstream)
    assert_close(actual, paper.covariance_backward(grad_sigma, x.detach()))


@sides
def test_tends_to_the_root_of_scipy(side: str) -> None:
    x = features(4, 9)
    expected = torch.from_numpy(sqrtm(paper.covariance(x).numpy()))
    errors = [(isqrt_cov(x, side=side, **chosen(steps)) - expected).norm() for steps in (1, 3, 6, 12, 25)]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[4] < 1e-9


@sides
@pytest.mark.parametrize("alpha", [1e-3, 0.5, 7.0, 1e4])
def test_homogeneity(side: str, alpha: float) -> None:
    """C(αX) = αC(X), and the gradient does not change with scale."""
    x = features(2, 5, 4)
    upstream = torch.randn(2, 5, 5, dtype=torch.float64)
    results, grads = [], []
    for scale in (1.0, alpha):
        leaf = (scale * x).requires_grad_()
        result = isqrt_cov(leaf, side=side)
        results.append(result.detach())
        grads.append(torch.autograd.grad(result, leaf, upstream)[0])
    assert_close(results[1], alpha * results[0])
    assert_close(grads[1], grads[0])


@sides
def test_offset_does_not_matter(side: str) -> None:
    x = features(2, 5, 4)
    assert_close(isqrt_cov(x + 10.0, side=side), isqrt_cov(x, side=side))


@sides
def test_order_of_positions_does_not_matter(side: str) -> None:
    x, weights, order = features(2, 4, 7), positive_weights(2, 7), torch.randperm(7)
    assert_close(isqrt_cov(x[..., order], side=side), isqrt_cov(x, side=side))
    permuted = isqrt_cov(x[..., order], weights=weights[..., order], side=side)
    assert_close(permuted, isqrt_cov(x, weights=weights, side=side))


@sides
def test_order_of_channels_permutes_the_result(side: str) -> None:
    x, order = features(2, 5, 7), torch.randperm(5)
    assert_close(isqrt_cov(x[:, order], side=side), isqrt_cov(x, side=side)[:, order][:, :, order])


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3), (2, 1, 2), (0,), (2, 0)])
@pytest.mark.parametrize("weighted", [False, True])
@sides
def test_leading_dimensions(leading: tuple[int, ...], weighted: bool, side: str) -> None:
    """Any number of leading dimensions works, including none and size zero. Each image is independent."""
    x = features(*leading, 3, 4).requires_grad_()
    weights = positive_weights(*leading, 4) if weighted else None
    result = isqrt_cov(x, weights=weights, side=side)
    assert result.shape == (*leading, 3, 3)
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad.shape == x.shape
    images, results = x.detach().reshape(-1, 3, 4), result.detach().reshape(-1, 3, 3)
    for i, (image, expected) in enumerate(zip(images, results, strict=True)):
        of_image = None if weights is None else weights.reshape(-1, 4)[i]
        assert_close(isqrt_cov(image, weights=of_image, side=side), expected)


@sides
@backwards
def test_result_is_symmetric(side: str, backward: str) -> None:
    result = isqrt_cov(features(2, 6, 5, dtype=torch.float32), side=side, backward=backward)
    assert_close(result, result.mT.clone(), 1e-6)


@sides
@backwards
def test_does_not_write_to_its_arguments(side: str, backward: str) -> None:
    """The gradient reuses memory. It must not overwrite the caller's tensors or block a second call."""
    x, weights = inputs(True, 2, 4, 5)
    x_before, weights_before = x.detach().clone(), weights.detach().clone()
    for arguments in ((x,), (x, weights)):
        result = operator(side=side, backward=backward)(*arguments)
        value = result.detach().clone()
        upstream = paper.symmetric(torch.randn_like(value))
        upstream_before = upstream.clone()
        first = [grad.clone() for grad in torch.autograd.grad(result, arguments, upstream, retain_graph=True)]
        second = torch.autograd.grad(result, arguments, upstream)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert torch.equal(upstream, upstream_before)
        assert torch.equal(result.detach(), value)
    assert torch.equal(x.detach(), x_before)
    assert torch.equal(weights.detach(), weights_before)


@pytest.mark.parametrize("steps", range(1, 8))
def test_auto_takes_the_side_with_fewer_multiplications(steps: int) -> None:
    """Count multiplications by running both sides, value and gradient, near the crossover and far from it."""
    c = 40
    sizes = [1, 20, *range(int(0.8 * c), int(1.05 * c) + 2), 80]
    taken = []
    for n in sizes:
        x = torch.randn(1, c, n)
        done = {}
        for side in ("channels", "positions", "auto"):
            counts = count_value_and_gradient(partial(isqrt_cov, side=side, **chosen(steps)), x)
            done[side] = sum(products.multiplications for products in counts)
        assert done["auto"] == min(done["channels"], done["positions"]), f"at n={n}"
        taken.append(cheaper_side(c, n, steps))
        assert done[taken[-1]] == done["auto"], f"at n={n}"
    # There is one crossover, and it lies inside the tested range.
    assert taken[0] == "positions"
    assert taken[-1] == "channels"
    assert taken == sorted(taken, reverse=True)


def test_auto_gives_the_result_of_the_side_it_takes() -> None:
    for c, n in ((8, 3), (3, 8)):
        x = features(2, c, n, dtype=torch.float32)
        for iteration, steps in (("fitted", 3), ("paper", 5)):
            side = cheaper_side(c, n, steps)
            assert torch.equal(
                isqrt_cov(x, iteration=iteration), isqrt_cov(x, iteration=iteration, side=side)
            )


@sides
@backwards
@pytest.mark.parametrize("weighted", [False, True])
def test_vector_is_the_triangle_of_the_matrix(side: str, backward: str, weighted: bool) -> None:
    """Value, gradient and tangent agree, and every derivative is that of finite differences."""
    arguments, f = inputs(weighted, 2, 4, 3), operator(side=side, backward=backward, vector=True)
    upstream = torch.randn(2, 10, dtype=torch.float64)
    results = f(*arguments), triu_vec(operator(side=side, backward=backward)(*arguments))
    assert_close(results[0].detach(), results[1].detach())
    grads = (torch.autograd.grad(result, arguments, upstream) for result in results)
    for actual, expected in zip(*grads, strict=True):
        assert_close(actual, expected)
    assert gradcheck(f, arguments, check_forward_ad=True, check_batched_grad=True)
    if weighted:
        assert gradgradcheck(f, inputs(True, 1, 3, 2), check_fwd_over_rev=True, check_batched_grad=True)


def test_vector_of_leading_dimensions_and_vmap() -> None:
    x = features(3, 2, 4, 5)
    vector = isqrt_cov(x, vector=True)
    assert_close(vector, triu_vec(isqrt_cov(x)))
    assert_close(torch.func.vmap(partial(isqrt_cov, vector=True))(x), vector)


def test_triangle_indices_of_inference_serve_training() -> None:
    x = features(2, 7, 5).requires_grad_()
    with torch.inference_mode():
        isqrt_cov(x, vector=True)
    isqrt_cov(x, vector=True).sum().backward()
    assert x.grad is not None


def test_steps_alone_never_change_the_iteration() -> None:
    x = features(2, 6, 9)
    for root, arguments in (
        (isqrt_cov, x),
        (matrix_sqrt, covariance(x)),
        (inverse_matrix_sqrt, covariance(x)),
    ):
        default, paper_default = root(arguments), root(arguments, iteration="paper")
        assert torch.equal(default, root(arguments, iteration="fitted", steps=3))
        assert torch.equal(default, root(arguments, steps=3))
        assert torch.equal(root(arguments, steps=4), root(arguments, iteration="fitted", steps=4))
        assert torch.equal(paper_default, root(arguments, iteration="paper", steps=5))
        assert not torch.equal(default, paper_default)
        assert not torch.equal(default, root(arguments, iteration="paper", steps=3))
    # The fitted steps differ by at most 2.1 %.
    assert_close(isqrt_cov(x), isqrt_cov(x, iteration="paper"), 0.03)


HALF = pytest.mark.parametrize(
    ("dtype", "of_value", "of_gradient"), [(torch.bfloat16, 0.03, 0.1), (torch.float16, 0.003, 0.01)]
)


@sides
@HALF
def test_products_in_half_precision(
    side: str, dtype: torch.dtype, of_value: float, of_gradient: float
) -> None:
    """Half precision is opt-in and applies to the products only. Input and output stay float32."""
    x = features(2, 16, 12, dtype=torch.float32).requires_grad_()
    upstream = torch.randn(2, 16, 16)
    exact = isqrt_cov(x, side=side)
    (exact_grad,) = torch.autograd.grad(exact, x, upstream)
    rough = isqrt_cov(x, side=side, compute_dtype=dtype)
    (rough_grad,) = torch.autograd.grad(rough, x, upstream)
    assert rough.dtype == torch.float32
    assert rough_grad.dtype == torch.float32
    assert_close(rough.detach(), exact.detach(), of_value)
    assert_close(rough_grad, exact_grad, of_gradient)
    assert not torch.equal(rough, exact)


@sides
@HALF
@pytest.mark.parametrize("compensation", ["matched", "none"])
@pytest.mark.parametrize(("size", "upstream_size"), [(1e-10, 1e10), (1e10, 1e-10)])
def test_half_precision_at_any_scale(
    side: str,
    dtype: torch.dtype,
    of_value: float,
    of_gradient: float,
    compensation: str,
    size: float,
    upstream_size: float,
) -> None:
    """Features, gradients and tangents are far outside the range of float16."""
    x = features(2, 16, 12, dtype=torch.float32) * size
    upstream, tangent = torch.randn(2, 16, 16) * upstream_size, torch.randn_like(x) * size * 1e-8
    found = []
    for compute_dtype in (None, dtype):
        f = partial(isqrt_cov, side=side, compensation=compensation, compute_dtype=compute_dtype)
        leaf = x.clone().requires_grad_()
        value = f(leaf)
        (grad,) = torch.autograd.grad(value, leaf, upstream)
        found.append((value.detach(), grad, torch.func.jvp(f, (x,), (tangent,))[1]))
    for (exact, rough), relative in zip(
        zip(*found, strict=True), (of_value, of_gradient, of_gradient), strict=True
    ):
        assert_close(rough, exact, relative)
