"""The square root and the inverse square root of matrices: all derivatives, and the conventions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from covpool.functional import covariance, inverse_matrix_sqrt, matrix_sqrt, root_report
from covpool.functional.newton_schulz import fitted_steps
from tests.functional import paper
from tests.functional.cover import grid
from tests.functional.samples import UNEVEN, chosen
from tests.functional.tolerances import assert_close

Root = Callable[..., Tensor]

ROOTS = [matrix_sqrt, inverse_matrix_sqrt]
PLAIN = {matrix_sqrt: paper.matrix_sqrt, inverse_matrix_sqrt: paper.inverse_matrix_sqrt}
EVERY_OPTION = grid(
    {"steps": (1, 2, UNEVEN)},  # no step, one step and several steps between the first and the last
    root=ROOTS,
    steps=[*range(1, 8), UNEVEN],
    normalization=["trace", "frobenius"],
    compensation=["matched", "none"],
    backward=["saved", "recompute"],
)
roots = pytest.mark.parametrize("root", ROOTS)
backwards = pytest.mark.parametrize("backward", ["saved", "recompute"])


def matrices(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return positive definite matrices. ``shape`` has all dimensions but the last."""
    half = torch.randn(*shape, shape[-1] + 2, dtype=dtype)
    return half @ half.mT


@EVERY_OPTION
def test_value(root: Root, steps: paper.Steps, normalization: str, compensation: str, backward: str) -> None:
    a = matrices(3, 5)
    expected = PLAIN[root](a, steps, normalization, compensation)
    options = {**chosen(steps), "normalization": normalization, "compensation": compensation}
    assert_close(root(a, backward=backward, **options), expected)
    assert_close(root(a.requires_grad_(), backward=backward, **options).detach(), expected)


@EVERY_OPTION
def test_gradcheck(
    root: Root, steps: paper.Steps, normalization: str, compensation: str, backward: str
) -> None:
    """Check reverse and forward mode, also batched, against finite differences."""
    f = partial(
        root, **chosen(steps), normalization=normalization, compensation=compensation, backward=backward
    )
    assert gradcheck(
        f,
        matrices(2, 3).requires_grad_(),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@EVERY_OPTION
def test_gradgradcheck(
    root: Root, steps: paper.Steps, normalization: str, compensation: str, backward: str
) -> None:
    """Check reverse over reverse and forward over reverse against finite differences of the gradient."""
    f = partial(
        root, **chosen(steps), normalization=normalization, compensation=compensation, backward=backward
    )
    a = matrices(1, 3).requires_grad_()
    assert gradgradcheck(f, a, check_fwd_over_rev=True, check_batched_grad=True)


@EVERY_OPTION
def test_double_backward_is_that_of_the_plain_equations(
    root: Root, steps: paper.Steps, normalization: str, compensation: str, backward: str
) -> None:
    """Iterates reused as constants would give a wrong second derivative without an error."""
    a, grad, direction = matrices(2, 4), torch.randn(2, 4, 4).double(), torch.randn(2, 4, 4).double()

    def second(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaf, upstream = a.clone().requires_grad_(), grad.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, upstream, create_graph=True)
        return first.detach(), *torch.autograd.grad(first, (leaf, upstream), direction)

    options = {"normalization": normalization, "compensation": compensation}
    actual = second(partial(root, backward=backward, **chosen(steps), **options))
    expected = second(partial(PLAIN[root], steps=steps, **options))
    for a_, e_ in zip(actual, expected, strict=True):
        assert_close(a_, e_, 1e-10)


@roots
@backwards
def test_hessian_vector_product_is_the_same_by_every_route(root: Root, backward: str) -> None:
    """Forward over reverse must not treat the saved iterates as constants, with or without a graph."""
    a, direction = matrices(2, 4), torch.randn(2, 4, 4).double()
    weight = torch.randn(2, 4, 4).double()

    def f(a: Tensor) -> Tensor:
        return (root(a, iteration="paper", backward=backward).sin() * weight).sum()

    def plain(a: Tensor) -> Tensor:
        return (PLAIN[root](a).sin() * weight).sum()

    def reverse_over_reverse(f: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = a.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.autograd.grad(first, leaf, direction)[0]

    expected = reverse_over_reverse(plain)
    assert_close(reverse_over_reverse(f), expected, 1e-10)
    for create_graph in (False, True):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a.clone().requires_grad_(), direction)
            (first,) = torch.autograd.grad(f(dual), dual, create_graph=create_graph)
            tangent = forward_ad.unpack_dual(first).tangent
        assert tangent is not None
        assert_close(tangent.detach(), expected, 1e-10)
    assert_close(torch.func.jvp(torch.func.grad(f), (a,), (direction,))[1], expected, 1e-10)


@roots
@backwards
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradient_is_symmetric(root: Root, backward: str, dtype: torch.dtype) -> None:
    """The gradient is symmetric for any upstream gradient. In the paper's public code it is not."""
    a = matrices(2, 6, dtype=dtype).requires_grad_()
    upstream = torch.randn_like(a)
    (grad,) = torch.autograd.grad(root(a, iteration="paper", backward=backward), a, upstream)
    assert_close(grad, grad.mT.clone())
    (plain,) = torch.autograd.grad(PLAIN[root](a), a, upstream)
    assert_close(grad, plain)


@roots
@backwards
def test_acts_on_the_symmetric_part(root: Root, backward: str) -> None:
    a = matrices(2, 4)
    skew = torch.randn_like(a)
    skew = skew - skew.mT
    leaf = (a + skew).requires_grad_()
    result = root(leaf, backward=backward)
    assert_close(result.detach(), root(a))
    assert_close(result.detach(), result.detach().mT.clone())
    (grad,) = torch.autograd.grad(result, leaf, torch.ones_like(a))
    (expected,) = torch.autograd.grad(root(a.requires_grad_()), a, torch.ones_like(a))
    assert_close(grad, expected)
    (tangent,) = torch.func.jvp(root, (a.detach(),), (skew,))[1:]
    assert tangent.abs().max() < 1e-12


@roots
@backwards
@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("compensation", ["matched", "none"])
def test_zero_matrix(root: Root, backward: str, normalization: str, compensation: str) -> None:
    """The result and its gradient are zero, and another matrix of the batch is unaffected."""
    a = torch.stack([torch.zeros(3, 3), torch.eye(3)]).requires_grad_()
    options = {"normalization": normalization, "compensation": compensation, "backward": backward}
    result = root(a, **options)
    (grad,) = torch.autograd.grad(result, a, torch.randn(2, 3, 3))
    assert torch.equal(result[0], torch.zeros(3, 3))
    assert torch.equal(grad[0], torch.zeros(3, 3))
    assert torch.equal(result[1], root(torch.eye(3), **options))
    assert grad[1].abs().max() > 0
    tangent = torch.func.jvp(partial(root, **options), (a.detach(),), (torch.ones(2, 3, 3),))[1]
    assert torch.equal(tangent[0], torch.zeros(3, 3))
    assert tangent.isfinite().all()


@roots
@pytest.mark.parametrize("leading", [(), (1,), (4,), (2, 3), (2, 1, 2), (0,), (2, 0)])
def test_leading_dimensions(root: Root, leading: tuple[int, ...]) -> None:
    """Any number of leading dimensions works, including none and size zero. Each matrix is independent."""
    a = matrices(*leading, 3).requires_grad_()
    result = root(a)
    assert result.shape == a.shape
    (grad,) = torch.autograd.grad(result.sum(), a)
    assert grad.shape == a.shape
    for one, expected in zip(a.detach().reshape(-1, 3, 3), result.detach().reshape(-1, 3, 3), strict=True):
        assert_close(root(one), expected)


@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
def test_tends_to_the_root_of_scipy(normalization: str) -> None:
    a = matrices(6)
    expected = torch.from_numpy(sqrtm(a.numpy()))
    roots = [matrix_sqrt(a, **chosen(steps), normalization=normalization) for steps in (2, 4, 8, 30)]
    errors = [(root - expected).norm() for root in roots]
    assert errors[0] > errors[1] > errors[2]
    assert_close(roots[-1], expected)
    assert_close(inverse_matrix_sqrt(a, **chosen(30), normalization=normalization), expected.inverse(), 1e-10)


@roots
def test_does_not_write_to_its_arguments(root: Root) -> None:
    """The gradient reuses memory, but must not overwrite the caller's tensors."""
    a = matrices(2, 4).requires_grad_()
    before = a.detach().clone()
    for backward in ("saved", "recompute"):
        for upstream in (torch.randn(2, 4, 4).double(), paper.symmetric(torch.randn(2, 4, 4).double())):
            kept = upstream.clone()
            result = root(a, backward=backward)
            value = result.detach().clone()
            first = torch.autograd.grad(result, a, upstream, retain_graph=True)[0].clone()
            second = torch.autograd.grad(result, a, upstream)[0]
            assert torch.equal(first, second)
            assert torch.equal(upstream, kept)
            assert torch.equal(result.detach(), value)
    assert torch.equal(a.detach(), before)


@roots
def test_half_precision_returns_float32(root: Root) -> None:
    a = torch.eye(3).expand(2, 3, 3)
    for dtype in (torch.float16, torch.bfloat16):
        leaf = a.to(dtype).clone().requires_grad_()
        result = root(leaf)
        assert result.dtype == torch.float32
        result.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
    assert root(a).dtype == torch.float32
    assert root(a.double()).dtype == torch.float64


# A result is a root, or NaN.


def wide() -> Tensor:
    """Return singular covariances, computed in float32."""
    return covariance(torch.randn(4, 64, 40, generator=torch.Generator().manual_seed(0)))


def test_more_steps_than_the_data_can_bear_give_nan() -> None:
    """The rounding errors of float32 data in float64 grow by 1.5 and more at every step."""
    a = wide().double().requires_grad_()
    fine = matrix_sqrt(a, **chosen(20))
    assert_close((fine @ fine).detach(), a.detach(), 1e-4)
    result = matrix_sqrt(a, **chosen(30))
    assert result.isnan().all()
    assert torch.autograd.grad(result.sum(), a)[0].isnan().all()
    assert inverse_matrix_sqrt(a, **chosen(40)).isnan().all()


def test_a_rounded_covariance_is_right_or_nan() -> None:
    a = wide()
    for steps in range(1, 16):
        found, exact = matrix_sqrt(a.bfloat16().float(), **chosen(steps)), matrix_sqrt(a, **chosen(steps))
        error = (found - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
        assert ((error < 0.1) | found.isnan().all(-1).all(-1)).all()
    assert found.isnan().all()


@roots
@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
def test_an_indefinite_matrix_gives_nan_and_leaves_the_others_alone(root: Root, normalization: str) -> None:
    good = torch.eye(3)
    a = torch.stack([torch.diag(torch.tensor([1.0, 0.5, -2.0])), good])
    for options in (chosen(5), chosen(15)):
        result = root(a, normalization=normalization, **options)
        assert result[0].isnan().all()
        assert torch.equal(result[1], root(good, normalization=normalization, **options))


@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("steps", [*range(1, 16), UNEVEN[:3], UNEVEN])
def test_a_root_is_never_taken_for_a_false_one(normalization: str, steps: paper.Steps) -> None:
    """Any spectrum, from the identity to one eigenvalue, at any number of steps."""
    values = torch.stack([torch.logspace(0, -low, 12) for low in (0, 0.1, 1, 3, 8, 30)])
    if not isinstance(steps, int):
        steps = fitted_steps(len(steps))
    result = matrix_sqrt(torch.diag_embed(values), normalization=normalization, **chosen(steps))
    assert result.isfinite().all()


def test_report() -> None:
    a = wide()
    assert root_report(a).fit
    assert root_report(a).most_steps == 15
    assert 20 <= root_report(a.double()).most_steps < 30
    rounded = root_report(a.bfloat16().float())
    assert rounded.fit
    assert 5 <= rounded.most_steps < 13
    assert "use at most" in str(rounded)
    bad = root_report(torch.stack([torch.eye(2), torch.diag(torch.tensor([1.0, -2.0]))]))
    assert (bad.fit, bad.most_steps) == (False, 0)
    assert "not positive semi-definite" in str(bad)
    skew = root_report(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    assert (skew.fit, skew.asymmetry) == (False, 0.5)
    assert "not symmetric" in str(skew)
    for other in (torch.zeros(3, 3), 1e-30 * torch.eye(3), 1e30 * torch.eye(3)):
        assert root_report(other).fit
    assert not root_report(torch.full((2, 2), torch.nan)).fit
