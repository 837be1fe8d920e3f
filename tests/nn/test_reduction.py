"""The reduction: its computation, its initialization, and the effect of masks on BatchNorm statistics."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.nn import CovPool, Reduction
from tests.functional.tolerances import assert_close

B, C, D = 3, 12, 5


def lively(reduction: Reduction) -> Reduction:
    """Set the BatchNorm tensors to values that differ from those of a new layer."""
    assert reduction.norm is not None
    for tensor in (reduction.norm.weight, reduction.norm.bias, reduction.norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(reduction.norm.running_var, 0.5, 2.0)
    return reduction


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(B, C, 4, 6), (B, C, 2, 4, 3)])
def test_maps_are_convolved_normalised_and_rectified(shape: tuple[int, ...], training: bool) -> None:
    reduction = lively(Reduction(C, D, "convolution")).train(training)
    norm, x = copy.deepcopy(reduction.norm), torch.randn(shape)
    y = torch.einsum("bc...,dc->bd...", x, reduction.projection.weight.flatten(1))
    y = F.batch_norm(
        y, norm.running_mean, norm.running_var, norm.weight, norm.bias, training, norm.momentum, norm.eps
    )
    assert_close(reduction(x), y.clamp(min=0))
    assert_close(reduction.norm.running_mean, norm.running_mean)
    assert_close(reduction.norm.running_var, norm.running_var)


def test_tokens_are_multiplied_and_nothing_else() -> None:
    reduction = Reduction(C, D, "linear")
    tokens = torch.randn(B, 15, C)
    assert_close(reduction(tokens.mT).mT, tokens @ reduction.projection.weight.T)


def test_told_linear_or_convolution_the_rank_does_not_matter() -> None:
    x = torch.randn(B, C, 4, 6)
    linear, convolution = Reduction(C, D, "linear"), Reduction(C, D, "convolution")
    assert_close(linear(x).flatten(2), linear(x.flatten(2)))
    assert_close(convolution(x).flatten(2), convolution(x.flatten(2)))
    assert linear(x).min() < 0 <= convolution(x.flatten(2)).min()


def test_number_of_parameters() -> None:
    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert count(CovPool(2048, dim=256)) == 2048 * 256 + 2 * 256
    assert count(CovPool(768, dim=64, reduction="linear")) == 768 * 64
    assert count(CovPool(2048, dim=None)) == 0


def test_where_the_weights_start() -> None:
    # 2048·256 normal values determine the standard deviation to 0.1 %.
    convolution = Reduction(2048, 256, "convolution").projection.weight
    assert convolution.shape == (256, 2048, 1, 1)
    assert convolution.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.01)
    linear = Reduction(2048, 256, "linear").projection.weight
    assert linear.std().item() == pytest.approx(2048**-0.5, rel=0.01)


def test_reset_parameters_starts_again() -> None:
    reduction = lively(Reduction(C, D, "convolution"))
    before = reduction.projection.weight.clone()
    reduction.reset_parameters()
    assert not torch.equal(reduction.projection.weight, before)
    new = nn.BatchNorm2d(D).state_dict()
    assert all(torch.equal(reduction.norm.state_dict()[name], new[name]) for name in new)


@pytest.mark.parametrize("shape", [(B, C, 4, 6), (B, 24, C)], ids=["map", "tokens"])
@pytest.mark.parametrize("reduction", ["convolution", "linear"])
def test_every_parameter_receives_a_gradient(shape: tuple[int, ...], reduction: str) -> None:
    pool = CovPool(C, dim=D, reduction=reduction)
    pool(torch.randn(shape)).square().sum().backward()
    for name, parameter in pool.named_parameters():
        assert parameter.grad is not None, name
    assert pool.reduction.projection.weight.grad.abs().max() > 0
    if pool.reduction.norm is not None:
        assert pool.reduction.norm.weight.grad.any()


def test_statistics_move_in_training_only() -> None:
    pool, x = CovPool(C, dim=D), 3 * torch.randn(B, C, 4, 6) + 1
    fresh = copy.deepcopy(pool.state_dict())
    pool.eval()
    evaluated = pool(x)
    assert all(torch.equal(pool.state_dict()[name], fresh[name]) for name in fresh)
    trained = pool.train()(x)
    assert pool.reduction.norm.num_batches_tracked == 1
    assert not torch.equal(pool.reduction.norm.running_mean, fresh["reduction.norm.running_mean"])
    assert not torch.allclose(trained, evaluated, atol=1e-2)


# Masks.


def masked(shape: tuple[int, ...] = (B, C, 4, 6)) -> tuple[Tensor, Tensor]:
    keep = torch.rand(shape[0], *shape[2:]) > 0.4
    return torch.randn(shape), keep


# At the small scale, the variance is as small as BatchNorm's epsilon.
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_equal_weights_are_batch_norm_itself(scale: float) -> None:
    weighted, plain = CovPool(C, dim=D), CovPool(C, dim=D)
    plain.load_state_dict(weighted.state_dict())
    x = scale * torch.randn(B, C, 4, 6)
    a, b = weighted(x, torch.full((B, 4, 6), 0.3)), plain(x)
    assert_close(a, b)
    grads = [torch.autograd.grad(y.square().sum(), p.parameters()) for y, p in ((a, weighted), (b, plain))]
    for one, other in zip(*grads, strict=True):
        assert_close(one, other, relative=1e-4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weighted.state_dict()[name], value)


def test_statistics_are_those_of_what_the_mask_keeps() -> None:
    # Every image keeps the same number of positions, so the kept positions form a smaller batch.
    x = torch.randn(B, C, 4, 6)
    keep = torch.zeros(B, 4, 6, dtype=torch.bool)
    keep[:, :, :4] = True
    one, other = CovPool(C, dim=D), CovPool(C, dim=D)
    other.load_state_dict(one.state_dict())
    assert_close(one(x, keep), other(x[..., :4]))
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value)


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 3e38, -1e20])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reduction", ["convolution", "linear"])
def test_what_is_masked_may_hold_anything(rubbish: float, kind: str, training: bool, reduction: str) -> None:
    pool = CovPool(C, dim=D, reduction=reduction).train(training)
    x, keep = masked()
    results = []
    for filling in (0.0, rubbish):
        filled = x.masked_fill(~keep.unsqueeze(1), filling).requires_grad_()
        weights = keep if kind == "bool" else keep.float()
        duplicate = copy.deepcopy(pool)
        y = duplicate(filled, weights)
        grads = torch.autograd.grad(y.square().sum(), [filled, *duplicate.parameters()])
        results.append([y, *grads, *duplicate.buffers()])
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(dirty, clean, rtol=1e-4, atol=1e-4 * clean.abs().max().item())


@pytest.mark.parametrize("training", [True, False])
def test_the_gradient_of_a_weight_that_is_zero_is_true(training: bool) -> None:
    pool = CovPool(C, dim=D).double().train(training)
    x, weights = torch.randn(B, C, 4, 6).double(), torch.rand(B, 24).double()
    weights[1, 3] = 0.0

    def loss(weights: Tensor) -> Tensor:
        return copy.deepcopy(pool)(x, weights).square().sum()

    (grad,) = torch.autograd.grad(loss(weights.requires_grad_()), weights)
    step = torch.zeros_like(weights)
    step[1, 3] = 1e-6
    # One-sided, because weights are not negative.
    slope = (loss(weights.detach() + step) - loss(weights.detach())) / 1e-6
    assert grad[1, 3].item() == pytest.approx(slope.item(), rel=1e-3)


def test_only_the_proportions_of_an_images_weights_count() -> None:
    pool, x, weights = CovPool(C, dim=D), torch.randn(B, C, 4, 6), torch.rand(B, 4, 6)
    scaled = weights * torch.tensor([1.0, 10.0, 0.1]).reshape(B, 1, 1)
    assert_close(pool(x, scaled), pool(x, weights))


def test_an_image_that_is_masked_altogether_gives_zero_and_does_not_count() -> None:
    x, keep = masked()
    keep[1] = False
    one, other = CovPool(C, dim=D), CovPool(C, dim=D)
    other.load_state_dict(one.state_dict())
    y = one(x, keep)
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert_close(y[[0, 2]], other(x[[0, 2]], keep[[0, 2]]))
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value)


def test_a_batch_that_is_masked_altogether_leaves_no_trace() -> None:
    pool, x = CovPool(C, dim=D), torch.randn(B, C, 4, 6, requires_grad=True)
    before = copy.deepcopy(pool.state_dict())
    y = pool(x, torch.zeros(B, 24, dtype=torch.bool))
    y.sum().backward()
    assert not y.any()
    assert not x.grad.any()
    assert all(torch.equal(pool.state_dict()[name], before[name]) for name in before)


def test_cumulative_averages_are_those_of_batch_norm() -> None:
    one = CovPool(C, dim=D)
    one.reduction.norm.momentum = None
    other = copy.deepcopy(one)
    for _ in range(3):
        x = torch.randn(B, C, 4, 6)
        one(x, torch.ones(B, 24))
        other(x)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value)


def test_synchronised_batch_norm_with_weights_is_refused_with_the_fix() -> None:
    pool = nn.SyncBatchNorm.convert_sync_batchnorm(CovPool(C, dim=D))
    x, keep = masked()
    with pytest.raises(TypeError, match=r"weights in training need torch\.nn\.BatchNorm2d.*eval mode"):
        pool(x, keep)


@pytest.mark.parametrize("kind", ["convolution", "linear"])
@pytest.mark.parametrize("shape", [(0, 6, 3, 2), (0, 6, 5)])
def test_no_images(kind: str, shape: tuple[int, ...]) -> None:
    reduction = Reduction(6, 4, kind).eval()
    assert reduction(torch.zeros(shape)).shape == (0, 4, *shape[2:])


def test_an_infinity_under_a_zero_weight_stays_hidden_in_float16() -> None:
    """1000 times a kept feature of 100 exceeds the range of float16."""
    x = torch.randn(2, 6, 3, 2)
    x[1, 0, 0, 0] = 100.0
    x[1, :, 2, 1] = torch.inf
    weights = torch.ones(2, 6)
    weights[1, 5] = 0.0
    reduction = Reduction(6, 4, "convolution").half()
    assert reduction(x.half(), weights).isfinite().all()


@pytest.mark.parametrize(("kind", "shape"), [("linear", (2, 6, 5)), ("convolution", (2, 6, 3, 2))])
def test_the_projection_is_called_as_a_module(kind: str, shape: tuple[int, ...]) -> None:
    """Hooks, FSDP2's unsharding and replaced layers depend on the call, not on the weight."""
    calls = []
    reduction = Reduction(6, 4, kind)
    reduction.projection.register_forward_hook(lambda *_: calls.append(1))
    reduction(torch.randn(shape))
    assert calls == [1]
