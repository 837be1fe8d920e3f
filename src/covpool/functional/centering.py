"""Center and scale features, with optional weights.

Three cases that a plain ``x - x.mean()`` gets wrong are solved here, for every operator:

* Scale: M is divided by ``s = max - min`` of the channel with the largest spread, so that activations of
  1e-12 and 1e12 are the same problem. The derivative treats s as a constant; the operators undo it exactly.
* Offset: each channel is first shifted by one of its own features (its minimum; with weights, the feature
  with the largest weight), then centered. This is exact for a channel that varies little around a large
value. * Flatness: a channel whose spread is within four rounding units of its magnitude holds rounding
  errors, not signal. It is zero in M and gets a zero gradient.

Shapes: x ``(B, C, n)``, weights ``(B, n)``; values per image are ``(B, 1, 1)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional.differentiable import may_overwrite
from covpool.functional.normalization import reciprocal_or_zero

# These are ints: torch.compile treats a module-level float as an input of the graph, and a second call in the
# same graph then fails.
# A channel is constant if its spread is at most this many units of rounding.
FLAT_ULPS = 4
# A feature at a position of weight zero becomes zero if it is this many times larger than every feature that
# counts: products with it would give Inf or NaN.
OUTLIER = 1000
# A feature at a position of weight zero is clipped at this many spreads. It does not change the value, only
# the derivative with respect to its weight.
OUTLIER_SPREADS = 1000


def normalized_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights divided by their sum; zeros where all are zero; NaN where one is negative."""
    w = weights.to(dtype)
    w = torch.where(w < 0, torch.nan, w)
    # Divide by the largest first, so that no sum overflows; the derivative does not depend on it.
    largest = w.detach().amax(-1, keepdim=True)
    w = w / torch.where(largest == 0, 1.0, largest)
    total = w.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, w / torch.where(total == 0, 1.0, total))


def without_outliers(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``x`` with zeros at positions of weight zero, which may contain anything, including NaN.

    If the weights are numbers, features of ordinary size stay: the derivative with respect to their weight
    depends on them.
    """
    hidden_B1n = (weights == 0).unsqueeze(1)
    if weights.dtype == torch.bool:
        return x.masked_fill(hidden_B1n, 0.0)
    size_BCn = x.detach().abs()
    largest_B11 = size_BCn.masked_fill(hidden_B1n, 0.0).amax((1, 2), keepdim=True)
    return x.masked_fill(hidden_B1n & ~(size_BCn < OUTLIER * largest_B11), 0.0)


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
    """Return the factor ``1/s`` of each channel, zero where it is constant, and s, ``(B, 1, 1)``.

    A constant image has s = 0 and factors 0, so its M is zero. NaN and Inf make their own image NaN, and no
    other.
    """
    spread = high - low
    magnitude = torch.maximum(high.abs(), low.abs())
    finfo = torch.finfo(spread.dtype)
    # A spread below the smallest normal number has no reciprocal and counts as constant.
    flat = spread <= (FLAT_ULPS * finfo.eps * magnitude).clamp_min(finfo.tiny)
    spread = spread.masked_fill(flat, 0.0)
    s = spread.amax(-2, keepdim=True)
    return reciprocal_or_zero(s).masked_fill(flat, 0.0), s


class _Centering(Function):
    """x to (m, s, scale), linear in x: gradient (Eqn. 11) and tangent are the same map."""

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
            # m is internal to this package, so its gradient was computed for this call only.
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
    # torch.compile cannot trace a Function with a jvp.
    return _Centering if torch.compiler.is_compiling() else _CenteringWithJvp


def _weighted(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Center with weights: plain operations, differentiable in x and in the weights."""
    w = normalized_weights(weights, x.dtype).unsqueeze(-2)
    keep = w > 0
    low = x.detach().masked_fill(~keep, torch.inf).amin(-1, keepdim=True)
    high = x.detach().masked_fill(~keep, -torch.inf).amax(-1, keepdim=True)
    empty = low > high  # no position kept at all
    scale, s = _scale(low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0))
    # Shift by the feature of the largest weight, not by the minimum: an outlier of tiny weight may be the
    # minimum, and would cost the other features their digits.
    heaviest = w.argmax(-1, keepdim=True).expand(-1, x.shape[-2], -1)
    shift = x.detach().gather(-1, heaviest).masked_fill(empty, 0.0)
    # Masked features may be NaN, Inf or 1e38, and must not enter a product, not even times zero.
    shifted = torch.where(keep, x - shift, _tame(x - shift, OUTLIER_SPREADS * s))
    # The mean of a constant channel's shifted features is rounding error, which may be huge in units of s
    # (6e4 at a spread of 1e-7). Use the shift as its mean, or positions of weight zero would carry the error.
    mean = (shifted * w).sum(-1, keepdim=True).masked_fill(scale == 0, 0.0)
    # A channel that is constant where it counts may vary at positions of weight zero, and then determines the
    # derivative with respect to those weights. So its factor is zero only where it counts.
    scale = torch.where(keep, scale, reciprocal_or_zero(s))
    return (shifted - mean) * scale * _differentiable_root(w, weights), s


def _tame(x: Tensor, limit: Tensor) -> Tensor:
    x = torch.where(x.isfinite(), x, 0.0)
    return torch.minimum(torch.maximum(x, -limit), limit)


def _differentiable_root(w: Tensor, weights: Tensor) -> Tensor:
    """Return √w with a finite and correct derivative at w = 0.

    The floor is too small to change a product (it is eps²/n). The gradient that reaches it is proportional to
    its root, so that the quotient is the derivative at zero.
    """
    if not weights.is_floating_point():
        return w.sqrt()
    floor = torch.finfo(w.dtype).eps ** 2 / w.shape[-1]
    return torch.where(w > 0, w, w + floor).sqrt()
