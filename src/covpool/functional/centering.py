"""Center and scale features, with optional weights, so that no activation overflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional.differentiable import may_overwrite
from covpool.functional.normalization import reciprocal_or_zero

# A feature at a position of weight zero that is this many times larger than every feature that counts
# is cut out before it meets a product: Inf and NaN would come out of it, and spread. (A whole number, for
# torch.compile takes a float of a module as an input of the graph.)
OUTLIER = 1000


def normalized_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights divided by their sum; all zero where all are zero; NaN where one is negative."""
    w = weights.to(dtype)
    w = torch.where(w < 0, torch.nan, w)
    # By the largest first, which the derivative may ignore, so that no sum overflows.
    largest = w.detach().amax(-1, keepdim=True)
    w = w / torch.where(largest == 0, 1.0, largest)
    total = w.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, w / torch.where(total == 0, 1.0, total))


def without_outliers(x: Tensor, weights: Tensor) -> Tensor:
    """``x`` with zeros for what a mask hides: positions of weight zero may hold anything, NaN included.

    Under weights that are numbers, a feature of ordinary size stays, since the derivative with respect
    to its weight depends on it.
    """
    hidden_B1n = (weights == 0).unsqueeze(1)
    if weights.dtype == torch.bool:
        return x.masked_fill(hidden_B1n, 0.0)
    size_BCn = x.detach().abs()
    largest_B11 = size_BCn.masked_fill(hidden_B1n, 0.0).amax((1, 2), keepdim=True)
    return x.masked_fill(hidden_B1n & ~(size_BCn < OUTLIER * largest_B11), 0.0)


# Whole numbers are constants to torch.compile; a float of a module becomes an input of the graph, and a
# second call in the same graph then fails.
FLAT_ULPS = 4
# How far, in spreads, a feature at a zero-weight position may lie before it is clipped. Such a feature
# never reaches the value; it only tells the derivative with respect to its weight.
OUTLIER_SPREADS = 1000


def center(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``(m, s)`` with ``m mᵀ · s²`` the (weighted) covariance of ``x``."""
    if weights is None:
        if x.requires_grad and torch.is_grad_enabled():
            m, s, _ = _centering_function().apply(x)  # type: ignore[no-untyped-call]
        else:
            m, s, _ = _uniform(x)
        return m, s / x.shape[-1] ** 0.5
    return _weighted(x, weights)


def _uniform(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, s = _scale(low, high)
    shifted = x - low
    return shifted.sub_(shifted.mean(-1, keepdim=True)).mul_(scale), s, scale


def _scale(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The factor ``1/s`` of each channel, zero where it is flat, and s itself, ``(B, 1, 1)``.

    A flat image has s = 0 and factors 0: its M is zero. NaN and Inf make the whole image NaN, and no
    other.
    """
    spread = high - low
    magnitude = torch.maximum(high.abs(), low.abs())
    finfo = torch.finfo(spread.dtype)
    # A spread below the smallest normal number has no reciprocal: flat as well.
    flat = spread <= (FLAT_ULPS * finfo.eps * magnitude).clamp_min(finfo.tiny)
    spread = spread.masked_fill(flat, 0.0)
    s = spread.amax(-2, keepdim=True)
    return reciprocal_or_zero(s).masked_fill(flat, 0.0), s


class _Centering(Function):
    """x to (m, s, scale). Linear in x, so its gradient and its tangent are the same map."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _uniform(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, s, scale = output
        ctx.mark_non_differentiable(s, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        scale: Tensor = ctx.saved_tensors[0]
        grad = grads[0]
        if grad is None:
            return None
        mean = grad.mean(-1, keepdim=True)
        if may_overwrite(grad, scale):
            # m never leaves the operators of this package: its gradient was made for this call alone.
            return grad.sub_(mean).mul_(scale)
        return (grad - mean) * scale


class _CenteringWithJvp(_Centering):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _Centering.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output[2])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return (tangent - tangent.mean(-1, keepdim=True)) * scale, None, None


def _centering_function() -> type[_Centering]:
    # A Function with a jvp cannot be traced by torch.compile; the same one without it can.
    return _Centering if torch.compiler.is_compiling() else _CenteringWithJvp


def _weighted(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same with positions weighted: plain operations, differentiable in x and in the weights."""
    w = normalized_weights(weights, x.dtype).unsqueeze(-2)
    keep = w > 0
    low = x.detach().masked_fill(~keep, torch.inf).amin(-1, keepdim=True)
    high = x.detach().masked_fill(~keep, -torch.inf).amax(-1, keepdim=True)
    empty = low > high  # no position kept at all
    scale, s = _scale(low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0))
    # Shifted not by the minimum but by the feature that weighs most: an outlier of hardly any weight may
    # be the minimum, and would cost the others their digits.
    heaviest = w.argmax(-1, keepdim=True).expand(-1, x.shape[-2], -1)
    shift = x.detach().gather(-1, heaviest).masked_fill(empty, 0.0)
    # What is masked may be NaN, Inf or 1e38: none of it may meet a product, not even times zero.
    shifted = torch.where(keep, x - shift, _tame(x - shift, OUTLIER_SPREADS * s))
    # The mean of a flat channel's shifted features is rounding, and in units of s that may be any size: one
    # of 6e4 beside a spread of 1e-7. Its mean is the shift itself, or zero-weight positions would carry it.
    mean = (shifted * w).sum(-1, keepdim=True).masked_fill(scale == 0, 0.0)
    # A channel that is flat where it counts may still be lively under a zero weight, and then decides
    # the derivative with respect to that weight: only what counts is silenced.
    scale = torch.where(keep, scale, reciprocal_or_zero(s))
    return (shifted - mean) * scale * _differentiable_root(w, weights), s


def _tame(x: Tensor, limit: Tensor) -> Tensor:
    x = torch.where(x.isfinite(), x, 0.0)
    return torch.minimum(torch.maximum(x, -limit), limit)


def _differentiable_root(w: Tensor, weights: Tensor) -> Tensor:
    """√w whose derivative at w = 0 stays finite and true.

    The floor is so small that no product notices it (its square is eps²/n), yet the gradient that
    comes back to it is proportional to it, so that the quotient is the derivative at zero.
    """
    if not weights.is_floating_point():
        return w.sqrt()
    floor = torch.finfo(w.dtype).eps ** 2 / w.shape[-1]
    return torch.where(w > 0, w, w + floor).sqrt()
