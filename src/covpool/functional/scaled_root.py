r"""The scaled root of symmetric matrices S, and the autograd function of every operator that has one.

.. math::
    R = c \, t^p \, Y_K(S/t) \quad \text{or} \quad R = c \, t^p \, Z_K(S/t), \qquad
    t = \operatorname{tr} S \quad \text{or} \quad t = \|S\|_F

With p = ½ and ``Y_K`` these are Eqns. (3), (2) and (4) of the paper, with p = −½ and ``Z_K`` the inverse
root. The number c is a constant of the derivative: the unit in which S was computed.

An :class:`Operator` computes S from its source, a matrix or features, and its result from R.
:func:`differentiable` saves and restores the tensors that its derivatives need.

Shapes: S ``(B, m, m)``, values per matrix ``(B, 1, 1)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional.covariance import upper_triangle
from covpool.functional.newton_schulz import (
    Coefficients,
    Iterates,
    newton_schulz,
    newton_schulz_backward,
    newton_schulz_jvp,
)
from covpool.functional.numerics import (
    Normalization,
    autocast_off,
    may_overwrite,
    needs_graph,
    norm_jvp,
    norm_of,
    scaled,
)


class Rule(NamedTuple):
    """Which root: Newton-Schulz coefficients, norm t, exponent p, and ``Z_K`` in place of ``Y_K``.

    ``triangle`` keeps the upper triangle of R alone, ``(B, 1, m(m+1)/2)``. ``checked`` makes R NaN where it
    cannot be a root; see :func:`possible`. ``dtype`` is that of the iteration.
    """

    coefficients: Coefficients
    normalization: Normalization
    power: float
    inverse: bool
    dtype: torch.dtype
    triangle: bool = False
    checked: bool = False


class Root(NamedTuple):
    """R, with 1/t, the factor ``c t^p`` and the iterates of the iteration."""

    value: Tensor
    over_t: Tensor
    factor: Tensor
    iterates: Iterates


def scaled_root(s: Tensor, c: Tensor, rule: Rule, keep: bool = False) -> Root:
    """Return R; ``keep`` saves the iterates for the derivatives. S may be overwritten."""
    t = norm_of(s, rule.normalization)
    t = t.masked_fill(t == 0, 1.0)  # the root of zero is zero with any t
    over_t = t.reciprocal()
    a = scaled(s, over_t).to(rule.dtype)
    root, iterates = newton_schulz(a, rule.coefficients, rule.inverse, keep)
    factor = c * t**rule.power
    if rule.checked:
        factor = torch.where(possible(iterates.ys[-1] if rule.inverse else root, a, rule), factor, torch.nan)
    return Root(scaled(_entries(root, rule).to(s.dtype), factor), over_t, factor, iterates)


def scaled_root_backward(g: Tensor, inner: Tensor, root: Root, rule: Rule) -> Tensor:
    r"""Return the gradient of S, given the symmetric gradient G of R: Eqns. (5) to (10) in one.

    .. math::
        \frac{\partial l}{\partial S} = D + \Big(\tfrac{p}{t} \langle G, R \rangle - \langle D, A \rangle\Big)
            \frac{\partial t}{\partial S}, \qquad
        D = \tfrac{c t^p}{t} \frac{\partial \langle G, Y_K \rangle}{\partial A}

    with :math:`\partial t/\partial S = I` for the trace and ``A`` for the Frobenius norm.

    Args:
        g: G, which may be overwritten.
        inner: ``⟨G, R⟩``, ``(B, 1, 1)``.
        root: R and the tensors saved with it.
        rule: the rule of R.
    """
    grad_a = newton_schulz_backward(g, root.iterates, rule.inverse)
    d = scaled(grad_a.to(inner.dtype), root.factor * root.over_t)
    a = root.iterates.ys[0].to(inner.dtype)
    along = torch.addcmul(dot(d, a), inner, root.over_t, value=-rule.power)
    if rule.normalization == "frobenius":
        return torch.addcmul(d, a, along, value=-1)
    # Subtract a multiple of I from the diagonal only.
    total = d if may_overwrite(d, along) else d.clone()
    total.diagonal(dim1=-2, dim2=-1).sub_(along.squeeze(-1))
    return total


def scaled_root_jvp(tangent: Tensor, root: Root, rule: Rule) -> Tensor:
    """Return the directional derivative of R along a symmetric ``tangent`` of S."""
    a = root.iterates.ys[0].to(tangent.dtype)
    change = norm_jvp(tangent, a, rule.normalization) * root.over_t
    da = (tangent * root.over_t - a * change).to(rule.dtype)
    droot = _entries(newton_schulz_jvp(da, root.iterates, rule.inverse), rule).to(tangent.dtype)
    return droot * root.factor + root.value * (rule.power * change)


def possible(y: Tensor, a: Tensor, rule: Rule) -> Tensor:
    r"""Return whether y has a norm that a root of a positive semi-definite A can have, ``(B, 1, 1)``.

    The eigenvalues of ``Y_K`` are at most those of the root, so :math:`\|Y_K\|_F^2 \le \operatorname{tr} A`;
    the fitted steps exceed it by up to 4.3 %. Rounding errors of A that make it indefinite grow at every
    step, and exceed it sooner or later.
    """
    excess = 1.01 if rule.coefficients[0] == (1.5, -0.5) else 1.05
    return norm_of(y, "frobenius").square() <= excess * norm_of(a, "trace")


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return ``⟨A, B⟩`` of each matrix, ``(B, 1, 1)``."""
    return (a * b).sum((-2, -1), keepdim=True)


def _entries(root: Tensor, rule: Rule) -> Tensor:
    return upper_triangle(root) if rule.triangle else root


class Operator(Protocol):
    """An operator with a root: its value and its derivatives. ``unit`` is a constant, ``(B, 1, 1)``."""

    @property
    def rule(self) -> Rule:
        """Return the rule of its root."""

    @property
    def kernel(self) -> bool:
        """Return whether the result is computed from R. Otherwise it is R."""

    def root(self, source: Tensor, unit: Tensor, keep: bool = False) -> Root:
        """Return R of the source; ``keep`` saves the iterates."""

    def result(self, source: Tensor, root: Root) -> Tensor:
        """Return the result."""

    def gradient(self, grad: Tensor, source: Tensor, unit: Tensor, root: Root) -> Tensor:
        """Return the gradient of the source."""

    def tangent(self, tangent: Tensor, source: Tensor, unit: Tensor, root: Root) -> Tensor:
        """Return the directional derivative of the result along a tangent of the source."""


def differentiable(source: Tensor, unit: Tensor, operator: Operator, save: bool, tangent: bool) -> Tensor:
    """Return the result of an operator, differentiable in ``source`` and not in ``unit``.

    Args:
        source: matrices or features.
        unit: ``(B, 1, 1)``, for the operator.
        operator: the operator.
        save: whether to save the iterates for backward; without, backward computes them again.
        tangent: whether a tangent of forward mode needs the operator's own derivative.
    """
    if not (tangent or (torch.is_grad_enabled() and source.requires_grad)):
        return operator.result(source, operator.root(source, unit))
    # A Function with a jvp cannot be traced by torch.compile; the same one without it can.
    function = _RootFunction if torch.compiler.is_compiling() else _RootFunctionWithJvp
    result: Tensor = function.apply(source, unit, operator, save)[0]  # type: ignore[no-untyped-call]
    return result


class _RootFunction(Function):
    """Source to result. The tensors that backward needs are further outputs without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(source: Tensor, unit: Tensor, operator: Operator, save: bool) -> tuple[Tensor, ...]:
        with autocast_off(source):
            root = operator.root(source, unit, keep=save)
            result = operator.result(source, root)
        if not save:
            return (result,)
        kernel = (root.value,) if operator.kernel else ()
        return (result, root.over_t, root.factor, *kernel, *root.iterates.flat)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Operator, bool], output: tuple[Tensor, ...]
    ) -> None:
        source, unit, ctx.operator, save = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(source, unit, *_saved(output, ctx.operator, save))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        source, unit, *saved = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None, None, None
        with autocast_off(source):
            root = _restored(source, unit, saved, ctx.operator, rebuild=needs_graph(source, grad))
            return ctx.operator.gradient(grad, source, unit, root), None, None, None


class _RootFunctionWithJvp(_RootFunction):
    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Operator, bool], output: tuple[Tensor, ...]
    ) -> None:
        _RootFunction.setup_context(ctx, inputs, output)
        source, unit, operator, save = inputs
        ctx.extra_outputs = len(output) - 1
        ctx.save_for_forward(source, unit, *_saved(output, operator, save))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        source, unit, *saved = ctx.saved_tensors
        with autocast_off(source):
            root = _restored(source, unit, saved, ctx.operator, rebuild=needs_graph(source, tangent))
            derivative = ctx.operator.tangent(tangent, source, unit, root)
        return derivative, *(None for _ in range(ctx.extra_outputs))


def _saved(output: tuple[Tensor, ...], operator: Operator, save: bool) -> tuple[Tensor, ...]:
    """Return the tensors to save: 1/t, the factor, R, and the iterates."""
    if not save:
        return ()
    result, over_t, factor, *others = output
    return (over_t, factor, *others) if operator.kernel else (over_t, factor, result, *others)


def _restored(source: Tensor, unit: Tensor, saved: list[Tensor], operator: Operator, rebuild: bool) -> Root:
    if rebuild or not saved:
        return operator.root(source, unit, keep=True)
    over_t, factor, value, *iterates = saved
    return Root(value, over_t, factor, Iterates.from_flat(tuple(iterates), operator.rule.coefficients))
