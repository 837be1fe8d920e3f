"""iSQRT-COV: the square root of the covariance of features, in one differentiable operator."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional import isqrt_sides as sides
from covpool.functional.arguments import check_choice, check_features, check_steps, check_weights
from covpool.functional.centering import center
from covpool.functional.covariance import as_batch
from covpool.functional.differentiable import autocast_off, needs_graph
from covpool.functional.matrix_sqrt import BACKWARDS, Backward
from covpool.functional.newton_schulz import STEPS, Iterates
from covpool.functional.normalization import (
    COMPENSATIONS,
    NORMALIZATIONS,
    Compensation,
    Normalization,
)

Side = Literal["auto", "channels", "positions"]
SIDES = ("auto", "channels", "positions")
COMPUTE_DTYPES = (None, torch.bfloat16)


def isqrt_cov(
    x: Tensor,
    *,
    steps: int = STEPS,
    normalization: Normalization = "trace",
    compensation: Compensation = "matched",
    weights: Tensor | None = None,
    side: Side = "auto",
    backward: Backward = "saved",
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Square root of the covariance of features by Newton-Schulz iteration (iSQRT-COV).

    This is the paper's meta-layer, :math:`C = \sqrt t \, Y_K(\Sigma/t)` with
    :math:`\Sigma = X \bar I X^T`: :func:`matrix_sqrt` of :func:`covariance`. It runs on the smaller of the
    C×C covariance and the n×n Gram matrix, to the same result.

    Args:
        x: features ``(..., C, n)``: channels, then positions.
        steps: K, the number of iterations (the paper's N).
        normalization: ``"trace"`` or ``"frobenius"``.
        compensation: ``"matched"`` (the paper's √t) or ``"none"``.
        weights: ``(..., n)``, boolean or non-negative, divided by their sum. Positions of weight zero may
            contain anything, including NaN.
        side: ``"channels"``, ``"positions"``, or ``"auto"`` for the one with fewer multiplications.
        backward: ``"saved"`` saves the iterates for backward, ``"recompute"`` only the centered features.
        compute_dtype: ``torch.bfloat16`` runs the iteration and its gradient in bfloat16, with an error of
            about 1 %. Centering, norm and compensation stay in float32. Global precision flags have no
            effect.

    Returns:
        ``(..., C, C)``, symmetric to rounding, in float32 for half-precision input. Zero, with zero gradient,
        where the covariance is zero.

    Example:
        >>> x = torch.randn(8, 256, 196)
        >>> isqrt_cov(x).shape
        torch.Size([8, 256, 256])
    """
    check_features(x)
    check_steps(steps)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("compensation", compensation, COMPENSATIONS)
    check_choice("side", side, SIDES)
    check_choice("backward", backward, BACKWARDS)
    check_choice("compute_dtype", compute_dtype, COMPUTE_DTYPES)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        if side == "auto":
            side = cheaper_side(x.shape[-2], _to_choose_by(x.shape[-1]), steps)
        dtype = compute_dtype or x_BCn.dtype
        options = sides.Options(steps, normalization, compensation, side == "positions", dtype)
        m_BCn, s = center(x_BCn, weights_Bn)
        if torch.is_grad_enabled() and m_BCn.requires_grad:
            # A Function with a jvp cannot be traced by torch.compile; the same one without it can.
            function = _IsqrtCov if torch.compiler.is_compiling() else _IsqrtCovWithJvp
            c_BCC: Tensor = function.apply(  # type: ignore[no-untyped-call]
                m_BCn, s, options, backward == "saved"
            )[0]
        else:
            c_BCC = sides.result(m_BCn, sides.value(m_BCn, s, options), options)
        return c_BCC.reshape(*x.shape[:-1], x.shape[-2])


def cheaper_side(channels: int, positions: int, steps: int) -> Literal["channels", "positions"]:
    """Return the side with fewer multiplications in value and gradient together."""
    c, n = channels, positions
    iteration = 7 * steps - 7
    if steps == 1:  # Y_1 = ½A(3I − A) takes a product each way, Z_1 = ½(3I − A) none
        return "positions" if 5 * n * n * c < 2 * c * c * c else "channels"
    on_positions = iteration * n * n * n + 5 * n * n * c
    on_channels = iteration * c * c * c
    return "positions" if on_positions < on_channels else "channels"


def _to_choose_by(positions: int) -> int:
    """Return the number of positions; of a dynamic size in torch.export, the example's.

    A comparison with the dynamic size would restrict it to sizes for which the same side is cheaper.
    """
    if torch.compiler.is_exporting() and isinstance(positions, torch.SymInt):
        from torch.fx.experimental import symbolic_shapes

        # New in torch 2.12; earlier releases have the attribute alone.
        hint = getattr(symbolic_shapes, "guarding_hint_or_throw", lambda size: size.node.hint)
        return int(hint(positions))
    return positions


class _IsqrtCov(Function):
    """m to C. The tensors that backward needs are further outputs without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, s: Tensor, options: sides.Options, save: bool) -> tuple[Tensor, ...]:
        with autocast_off(m):
            value = sides.value(m, s, options, keep=save)
            c = sides.result(m, value, options)
        if not save:
            return (c,)
        kernel = (value.kernel,) if options.positions else ()
        return (c, value.t, value.factor, *kernel, *value.iterates.flat)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, sides.Options, bool], output: tuple[Tensor, ...]
    ) -> None:
        m, s, ctx.options, save = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(m, s, *_kept(output, ctx.options, save))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        m, s, *saved = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None, None, None
        with autocast_off(m):
            value = _restore(m, s, saved, ctx.options, rebuild=needs_graph(m, grad))
            return sides.value_backward(grad, m, value, ctx.options), None, None, None


class _IsqrtCovWithJvp(_IsqrtCov):
    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, sides.Options, bool], output: tuple[Tensor, ...]
    ) -> None:
        _IsqrtCov.setup_context(ctx, inputs, output)
        m, s, options, save = inputs
        ctx.extra_outputs = len(output) - 1
        ctx.save_for_forward(m, s, *_kept(output, options, save))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        m, s, *saved = ctx.saved_tensors
        with autocast_off(m):
            value = _restore(m, s, saved, ctx.options, rebuild=needs_graph(m, tangent))
            dc = sides.value_jvp(tangent, m, value, ctx.options)
        return dc, *(None for _ in range(ctx.extra_outputs))


def _kept(output: tuple[Tensor, ...], options: sides.Options, save: bool) -> tuple[Tensor, ...]:
    """Return the tensors to save. The positions side does not need C, so it does not save it."""
    if not save:
        return ()
    return output[1:] if options.positions else output


def _restore(m: Tensor, s: Tensor, saved: list[Tensor], options: sides.Options, rebuild: bool) -> sides.Value:
    if rebuild or not saved:
        return sides.value(m, s, options, keep=True)
    if options.positions:
        t, factor, kernel, *iterates = saved
    else:
        kernel, t, factor, *iterates = saved
    return sides.Value(t, factor, kernel, Iterates.from_flat(tuple(iterates)))
