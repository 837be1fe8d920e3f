"""The square root of positive semi-definite matrices and its inverse, by matrix products only."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional.arguments import check_choice, check_square, step_coefficients
from covpool.functional.newton_schulz import (
    Coefficients,
    Iterates,
    Iteration,
    newton_schulz,
    newton_schulz_backward,
    newton_schulz_jvp,
)
from covpool.functional.numerics import (
    COMPENSATIONS,
    NORMALIZATIONS,
    Compensation,
    Normalization,
    at_least_float32,
    autocast_off,
    largest_entry,
    needs_graph,
    norm_jvp,
    norm_of,
    normalization_backward,
    reciprocal_or_zero,
    root_or_zero,
    scaled,
)

Backward = Literal["saved", "recompute"]
BACKWARDS = ("saved", "recompute")


def matrix_sqrt(
    a: Tensor,
    *,
    iteration: Iteration = "fitted",
    steps: int | None = None,
    normalization: Normalization = "trace",
    compensation: Compensation = "matched",
    backward: Backward = "saved",
) -> Tensor:
    r"""Return the square root of positive semi-definite matrices by coupled Newton-Schulz iteration.

    The three layers of the paper, Eqns. (3), (2) and (4), with t the trace or the Frobenius norm:

    .. math::
        A &= \Sigma / t, \qquad Y_0 = A, \quad Z_0 = I \\
        Y_{k} &= \tfrac12 Y_{k-1} (3I - Z_{k-1} Y_{k-1}), \quad
        Z_{k} = \tfrac12 (3I - Z_{k-1} Y_{k-1}) Z_{k-1} \\
        C &= \sqrt t \, Y_K

    The default iteration replaces 3/2 and 1/2 by fitted coefficients, with almost the result of the paper's 5
    steps in 3. It takes 6 products forward and 8 backward; 5 steps take 12 and 16. It acts on ½(a + aᵀ), so
    its gradient is symmetric.

    Args:
        a: ``(..., m, m)``, positive semi-definite. A zero matrix gives zero, with zero gradient.
        iteration: ``"fitted"``, with almost the result of the paper's 5 steps, or ``"paper"``.
        steps: K, the number of steps (the paper's N): 3 or 4 of the fitted iteration, 3 by default; any
            number of the paper's, 5 by default. More steps come closer to the root, but each multiplies
            rounding errors on the null space, by 1.5 in the value and by 2.25 in the gradient. So K is at
            most 15 in float32, where the gradient of a singular matrix is off by up to 0.1 %, and 40 in
            float64.
        normalization: ``"trace"`` or ``"frobenius"``.
        compensation: ``"matched"`` multiplies by √t; ``"none"`` returns the root of a/t.
        backward: ``"saved"`` saves the iterates for backward; ``"recompute"`` saves only ``a`` and runs the
            iteration again.

    Returns:
        ``(..., m, m)``, in float32 for half-precision input.

    Example:
        >>> a = torch.diag(torch.tensor([4.0, 1.0]))
        >>> matrix_sqrt(a, iteration="paper", steps=10)
        tensor([[2.0000, 0.0000],
                [0.0000, 1.0000]])
    """
    return _root(a, iteration, steps, normalization, compensation, backward, inverse=False)


def inverse_matrix_sqrt(
    a: Tensor,
    *,
    iteration: Iteration = "fitted",
    steps: int | None = None,
    normalization: Normalization = "trace",
    compensation: Compensation = "matched",
    backward: Backward = "saved",
) -> Tensor:
    r"""Return the inverse square root of positive definite matrices: :math:`Z_K/\sqrt t` of the iteration.

    See :func:`matrix_sqrt` for the equations and arguments. On the null space of a singular matrix the result
    grows as 1.5^K (the product of all a) instead of being infinite. The zero matrix gives zero.

    Example:
        >>> a = torch.diag(torch.tensor([4.0, 1.0]))
        >>> inverse_matrix_sqrt(a, iteration="paper", steps=10)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.0000]])
    """
    return _root(a, iteration, steps, normalization, compensation, backward, inverse=True)


class _Options(NamedTuple):
    coefficients: Coefficients
    normalization: Normalization
    compensation: Compensation
    inverse: bool

    def power(self) -> float:
        """The exponent of t in the compensation."""
        if self.compensation == "none":
            return 0.0
        return -0.5 if self.inverse else 0.5


def _root(
    a: Tensor,
    iteration: Iteration,
    steps: int | None,
    normalization: Normalization,
    compensation: Compensation,
    backward: Backward,
    inverse: bool,
) -> Tensor:
    check_square("a", a)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("compensation", compensation, COMPENSATIONS)
    check_choice("backward", backward, BACKWARDS)
    coefficients = step_coefficients(iteration, steps, torch.promote_types(a.dtype, torch.float32))
    options = _Options(coefficients, normalization, compensation, inverse)
    with autocast_off(a):
        a_Bmm = at_least_float32(a).reshape(-1, *a.shape[-2:])
        if torch.is_grad_enabled() and a_Bmm.requires_grad:
            # A Function with a jvp cannot be traced by torch.compile; the same one without it can.
            function = _MatrixRoot if torch.compiler.is_compiling() else _MatrixRootWithJvp
            root_Bmm: Tensor = function.apply(  # type: ignore[no-untyped-call]
                a_Bmm, options, backward == "saved"
            )[0]
        else:
            root_Bmm = _value(a_Bmm, options).root
        return root_Bmm.reshape(a.shape)


class _Value(NamedTuple):
    root: Tensor
    t: Tensor
    scale: Tensor
    iterates: Iterates


def _value(a: Tensor, options: _Options, keep: bool = False) -> _Value:
    """Compute Eqns. (3), (2) and (4)."""
    # Dividing by the largest entry prevents overflow. The result does not depend on it, so it is a constant
    # of the derivative.
    scale = largest_entry(a)
    symmetric = (a + a.mT) * (0.5 * reciprocal_or_zero(scale))
    t = norm_of(symmetric, options.normalization)
    root, iterates = newton_schulz(
        scaled(symmetric, reciprocal_or_zero(t)), options.coefficients, options.inverse, keep
    )
    if options.compensation == "matched":
        root = scaled(root, _compensation(t, scale, options))
    elif options.inverse:
        root = root * (scale != 0)
    return _Value(root, t, scale, iterates)


def _compensation(t: Tensor, scale: Tensor, options: _Options) -> Tensor:
    size = t * scale
    if options.inverse:
        size = reciprocal_or_zero(size)
    return root_or_zero(size)


class _MatrixRoot(Function):
    """``a`` to its root. The tensors that backward needs are further outputs without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, options: _Options, save: bool) -> tuple[Tensor, ...]:
        with autocast_off(a):
            value = _value(a, options, keep=save)
        if not save:
            return (value.root,)
        return (value.root, value.t, value.scale, *value.iterates.flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Options, bool], output: tuple[Tensor, ...]) -> None:
        a, ctx.options, save = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, *(output if save else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        a, *saved = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None, None
        with autocast_off(a):
            value = _restore(a, saved, ctx.options, rebuild=needs_graph(a, grad))
            return _value_backward(grad, value, ctx.options), None, None


class _MatrixRootWithJvp(_MatrixRoot):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Options, bool], output: tuple[Tensor, ...]) -> None:
        _MatrixRoot.setup_context(ctx, inputs, output)
        a, _, save = inputs
        ctx.extra_outputs = len(output) - 1
        ctx.save_for_forward(a, *(output if save else ()))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        a, *saved = ctx.saved_tensors
        with autocast_off(a):
            value = _restore(a, saved, ctx.options, rebuild=needs_graph(a, tangent))
            droot = _value_jvp(tangent, value, ctx.options)
        return droot, *(None for _ in range(ctx.extra_outputs))


def _restore(a: Tensor, saved: list[Tensor], options: _Options, rebuild: bool) -> _Value:
    if rebuild or not saved:
        return _value(a, options, keep=True)
    root, t, scale, *iterates = saved
    return _Value(root, t, scale, Iterates.from_flat(tuple(iterates), options.coefficients))


def _value_backward(grad: Tensor, value: _Value, options: _Options) -> Tensor:
    t, a = value.t, value.iterates.ys[0]
    grad = (grad + grad.mT) * 0.5
    inner = (grad * value.root).sum((-2, -1), keepdim=True)
    factor = reciprocal_or_zero(t * value.scale)
    if options.compensation == "matched":
        compensation = _compensation(t, value.scale, options)
        factor = factor * compensation
        inner = inner * reciprocal_or_zero(compensation)
    grad_a = newton_schulz_backward(grad, value.iterates, options.inverse)
    return normalization_backward(grad_a, a, inner, options.power(), options.normalization) * factor


def _value_jvp(tangent: Tensor, value: _Value, options: _Options) -> Tensor:
    t, a = value.t, value.iterates.ys[0]
    over_t = reciprocal_or_zero(t)
    tangent = (tangent + tangent.mT) * (0.5 * reciprocal_or_zero(value.scale))
    dt = norm_jvp(tangent, a, options.normalization)
    droot = newton_schulz_jvp((tangent - a * dt) * over_t, value.iterates, options.inverse)
    if options.compensation == "matched":
        droot = droot * _compensation(t, value.scale, options)
    return droot + value.root * (options.power() * dt * over_t)
