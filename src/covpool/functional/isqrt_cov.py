"""iSQRT-COV: the square root of the covariance of features, in one differentiable operator.

The iteration runs on either side of the features. Let M be the centered features ``(B, C, n)``, t the norm of
``M Mᵀ``, ``A = M Mᵀ/t`` (C×C) and ``G = Mᵀ M/t`` (n×n). Every iterate is a polynomial, so

.. math::  Y_K(A) = A Z_K(A) = M Z_K(G) M^T / t ,

and the smaller matrix gives the same result. Both have the same trace and the same Frobenius norm, so both
normalizations work on both sides.

Both sides return ``C = s · t^p · Y_K``. The factor s undoes the scale that centering removed. The exponent
p = ½ is the paper's post-compensation; without it, p = 0 and s = 1.

Products in addition to the iteration's: channels 1 + 1 (value + gradient), positions 3 + 4.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional.arguments import check_choice, check_features, check_weights, step_coefficients
from covpool.functional.covariance import as_batch, center
from covpool.functional.matrix_sqrt import BACKWARDS, Backward
from covpool.functional.newton_schulz import (
    Coefficients,
    Iterates,
    Iteration,
    accumulate,
    newton_schulz,
    newton_schulz_backward,
    newton_schulz_jvp,
)
from covpool.functional.numerics import (
    COMPENSATIONS,
    NORMALIZATIONS,
    Compensation,
    Normalization,
    autocast_off,
    in_units_of_norm,
    is_dual,
    may_overwrite,
    needs_graph,
    norm_jvp,
    norm_of,
    normalization_backward,
    reciprocal_or_zero,
    root_or_zero,
    scaled,
)

Side = Literal["auto", "channels", "positions"]
SIDES = ("auto", "channels", "positions")
COMPUTE_DTYPES = (None, torch.bfloat16, torch.float16)


def isqrt_cov(
    x: Tensor,
    *,
    iteration: Iteration = "fitted",
    steps: int | None = None,
    normalization: Normalization = "trace",
    compensation: Compensation = "matched",
    weights: Tensor | None = None,
    side: Side = "auto",
    backward: Backward = "saved",
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Square root of the covariance of features by Newton-Schulz iteration (iSQRT-COV).

    This is the paper's meta-layer, :math:`C = \sqrt t \, Y_K(\Sigma/t)` with
    :math:`\Sigma = X \bar I X^T`: :func:`matrix_sqrt` of :func:`covariance`, with the same arguments and
    defaults. It runs on the smaller of the C×C covariance and the n×n Gram matrix, to the same result.

    Args:
        x: features ``(..., C, n)``: channels, then positions.
        iteration: ``"fitted"``, with almost the result of the paper's 5 steps, or ``"paper"``.
        steps: K, the number of steps (the paper's N): 3 or 4 of the fitted iteration, 3 by default; any
            number of the paper's, 5 by default, at most 15 in float32 and 40 in float64: see
            :func:`matrix_sqrt`.
        normalization: ``"trace"`` or ``"frobenius"``.
        compensation: ``"matched"`` (the paper's √t) or ``"none"``.
        weights: ``(..., n)``, boolean or non-negative, divided by their sum. Positions of weight zero may
            contain anything, including NaN.
        side: ``"channels"``, ``"positions"``, or ``"auto"`` for the one with fewer multiplications.
        backward: ``"saved"`` saves the iterates for backward, ``"recompute"`` only the centered features.
        compute_dtype: ``torch.bfloat16`` or ``torch.float16`` runs the iteration and its gradient in half
            precision, with errors of about 1 % and 0.1 % at 5 steps, and at most 8 and 10 steps. Centering,
            norm and compensation stay in float32.
            Global precision flags have no effect.

    Returns:
        ``(..., C, C)``, symmetric to rounding, in float32 for half-precision input. Zero, with zero gradient,
        where the covariance is zero.

    Example:
        >>> x = torch.randn(8, 256, 196)
        >>> isqrt_cov(x).shape
        torch.Size([8, 256, 256])
    """
    check_features(x)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("compensation", compensation, COMPENSATIONS)
    check_choice("side", side, SIDES)
    check_choice("backward", backward, BACKWARDS)
    check_choice("compute_dtype", compute_dtype, COMPUTE_DTYPES)
    dtype = compute_dtype or torch.promote_types(x.dtype, torch.float32)
    coefficients = step_coefficients(iteration, steps, dtype)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        if side == "auto":
            side = cheaper_side(x.shape[-2], _to_choose_by(x.shape[-1]), len(coefficients))
        options = Options(coefficients, normalization, compensation, side == "positions", dtype)
        m_BCn, s = center(x_BCn, weights_Bn)
        derivative, after = torch.is_grad_enabled() and m_BCn.requires_grad, None
        if compute_dtype == torch.float16:
            # Features of norm 1, and their scale after the products: float16 has a small range. So a tangent
            # needs the Function too, which scales it.
            m_BCn, size = in_units_of_norm(m_BCn)
            derivative = derivative or (not torch.compiler.is_compiling() and is_dual(m_BCn))
            if compensation == "matched":
                s, after = torch.ones_like(s), s * size
        if derivative:
            # A Function with a jvp cannot be traced by torch.compile; the same one without it can.
            function = _IsqrtCov if torch.compiler.is_compiling() else _IsqrtCovWithJvp
            c_BCC: Tensor = function.apply(  # type: ignore[no-untyped-call]
                m_BCn, s, options, backward == "saved"
            )[0]
        else:
            c_BCC = _result(m_BCn, _value(m_BCn, s, options), options)
        if after is not None:
            c_BCC = c_BCC * after
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


def positions_kernel(
    m: Tensor,
    s: Tensor,
    coefficients: Coefficients,
    normalization: Normalization,
    compensation: Compensation,
) -> Tensor:
    """Return the n×n matrix K with ``C = m K mᵀ``, for centered features m and their scale s."""
    return _value(m, s, Options(coefficients, normalization, compensation, True, m.dtype)).kernel


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
    def forward(m: Tensor, s: Tensor, options: Options, save: bool) -> tuple[Tensor, ...]:
        with autocast_off(m):
            value = _value(m, s, options, keep=save)
            c = _result(m, value, options)
        if not save:
            return (c,)
        kernel = (value.kernel,) if options.positions else ()
        return (c, value.t, value.factor, *kernel, *value.iterates.flat)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Options, bool], output: tuple[Tensor, ...]
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
            g = grad + grad.mT  # twice the symmetric part
            if ctx.options.dtype == torch.float16:  # linear in g
                g, size = in_units_of_norm(g)
                return _value_backward(g, m, value, ctx.options) * size, None, None, None
            return _value_backward(g, m, value, ctx.options), None, None, None


class _IsqrtCovWithJvp(_IsqrtCov):
    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Options, bool], output: tuple[Tensor, ...]
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
            if ctx.options.dtype == torch.float16:  # linear in the tangent
                tangent, size = in_units_of_norm(tangent)
                dc = _value_jvp(tangent, m, value, ctx.options) * size
            else:
                dc = _value_jvp(tangent, m, value, ctx.options)
        return dc, *(None for _ in range(ctx.extra_outputs))


def _kept(output: tuple[Tensor, ...], options: Options, save: bool) -> tuple[Tensor, ...]:
    """Return the tensors to save. The positions side does not need C, so it does not save it."""
    if not save:
        return ()
    return output[1:] if options.positions else output


def _restore(m: Tensor, s: Tensor, saved: list[Tensor], options: Options, rebuild: bool) -> Value:
    if rebuild or not saved:
        return _value(m, s, options, keep=True)
    if options.positions:
        t, factor, kernel, *iterates = saved
    else:
        kernel, t, factor, *iterates = saved
    return Value(t, factor, kernel, Iterates.from_flat(tuple(iterates), options.coefficients))


class Options(NamedTuple):
    """Options of the operator; ``dtype`` is the dtype of the products."""

    coefficients: Coefficients
    normalization: Normalization
    compensation: Compensation
    positions: bool
    dtype: torch.dtype

    def power(self) -> float:
        """p, the exponent of t in the result."""
        return 0.5 if self.compensation == "matched" else 0.0


class Value(NamedTuple):
    """The tensors that the result and its derivatives are computed from.

    ``kernel`` is C on the channels side. On the positions side it is the scaled ``Z_K`` with
    ``C = M kernel Mᵀ``. ``factor`` is its scale.
    """

    t: Tensor
    factor: Tensor
    kernel: Tensor
    iterates: Iterates


def _value(m: Tensor, s: Tensor, options: Options, keep: bool = False) -> Value:
    """Run the iteration on centered features m, ``(B, C, n)``; ``keep`` saves the iterates for backward."""
    x = m.to(options.dtype)
    gram = torch.bmm(x.mT, x) if options.positions else torch.bmm(x, x.mT)
    gram = gram.to(m.dtype)
    t = norm_of(gram, options.normalization)
    over_t = reciprocal_or_zero(t)
    a = scaled(gram, over_t).to(options.dtype)
    root, iterates = newton_schulz(a, options.coefficients, inverse=options.positions, keep=keep)
    factor = _factor(t, s, options)
    if options.positions:
        factor = factor * over_t
    kernel = scaled(root.to(m.dtype), factor)
    if options.positions:
        kernel = kernel.to(options.dtype)
    return Value(t, factor, kernel, iterates)


def _result(m: Tensor, value: Value, options: Options) -> Tensor:
    """Return C: 2 more products on the positions side."""
    if not options.positions:
        return value.kernel
    x = m.to(options.dtype)
    return torch.bmm(torch.bmm(x, value.kernel), x.mT).to(m.dtype)


def _factor(t: Tensor, s: Tensor, options: Options) -> Tensor:
    if options.compensation == "none":
        return torch.ones_like(t)
    return root_or_zero(t) * s


def _value_backward(g: Tensor, m: Tensor, value: Value, options: Options) -> Tensor:
    """Return the gradient with respect to m: Eqns. (5) to (10), and (11) up to centering.

    ``g`` is the gradient of C plus its transpose.
    """
    x, g = m.to(options.dtype), g.to(options.dtype)
    if options.positions:
        return _positions_backward(g, x, m.dtype, value, options)
    return _channels_backward(g, x, m.dtype, value, options)


def _channels_backward(g: Tensor, x: Tensor, dtype: torch.dtype, value: Value, options: Options) -> Tensor:
    inner = _dot(g, value.kernel, dtype) * reciprocal_or_zero(value.factor)
    grad_a = newton_schulz_backward(g, value.iterates).to(dtype)
    d = _gram_backward(grad_a, inner, options.power(), value, options)
    return torch.bmm(d.to(options.dtype), x).to(dtype)


def _positions_backward(g: Tensor, x: Tensor, dtype: torch.dtype, value: Value, options: Options) -> Tensor:
    gx = torch.bmm(g, x)
    h = torch.bmm(x.mT, gx)
    grad_x = torch.bmm(gx, value.kernel)
    inner = _dot(h, value.kernel, dtype) * reciprocal_or_zero(value.factor)
    grad_a = newton_schulz_backward(h, value.iterates, inverse=True).to(dtype)
    d = _gram_backward(grad_a, inner, options.power() - 1, value, options)
    overwrite = may_overwrite(grad_x, d)
    return accumulate(grad_x, x, d.to(options.dtype), beta=1.0, alpha=1.0, overwrite=overwrite).to(dtype)


def _gram_backward(grad_a: Tensor, inner: Tensor, power: float, value: Value, options: Options) -> Tensor:
    a = value.iterates.ys[0].to(grad_a.dtype)
    d = normalization_backward(grad_a, a, inner, power, options.normalization)
    return scaled(d, value.factor * reciprocal_or_zero(value.t))


def _value_jvp(tangent: Tensor, m: Tensor, value: Value, options: Options) -> Tensor:
    """Return the directional derivative of C along a tangent of m."""
    x, dx = m.to(options.dtype), tangent.to(options.dtype)
    half = torch.bmm(x.mT, dx) if options.positions else torch.bmm(dx, x.mT)
    half = half.to(m.dtype)
    dgram = half + half.mT
    a = value.iterates.ys[0].to(m.dtype)
    over_t = reciprocal_or_zero(value.t)
    dt = norm_jvp(dgram, a, options.normalization)
    da = ((dgram - a * dt) * over_t).to(options.dtype)
    droot = newton_schulz_jvp(da, value.iterates, inverse=options.positions).to(m.dtype)
    if not options.positions:
        return droot * value.factor + value.kernel * (options.power() * dt * over_t)
    dkernel = droot * value.factor + value.kernel * ((options.power() - 1) * dt * over_t)
    middle = torch.bmm(torch.bmm(x, dkernel.to(options.dtype)), x.mT)
    outer = torch.bmm(torch.bmm(dx, value.kernel), x.mT)
    return (middle + outer + outer.mT).to(m.dtype)


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) * b.to(dtype)).sum((-2, -1), keepdim=True)
