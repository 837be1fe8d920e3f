"""The square root with its value and its gradient computed in ways that are chosen apart.

:func:`covpool.functional.matrix_sqrt` differentiates the iteration it runs. The methods before and after it
take the gradient of the exact root instead, whatever their value is; this is what they share.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from covpool.functional.arguments import check_square
from covpool.functional.eigen import matrix_power, reciprocal_of_sums, spectrum
from covpool.functional.lyapunov import solve_by_eigenvalues, solve_by_iteration
from covpool.functional.newton_schulz import newton_schulz
from covpool.functional.normalization import largest_entry, norm_of, reciprocal_or_zero, root_or_zero
from covpool.functional.precision import at_least_float32, autocast_off
from covpool.functional.rational_root import pade_root, taylor_root

RootForward = Literal["svd", "newton_schulz", "pade", "taylor"]
RootBackward = Literal["svd", "lyapunov", "lyapunov_iteration"]


class RootOptions(NamedTuple):
    """How value and gradient are computed.

    Attributes:
        forward: ``"svd"``, ``"newton_schulz"``, ``"pade"`` or ``"taylor"``. The singular value decomposition
            of a positive semi-definite matrix is its eigendecomposition, computed as such.
        order: steps of the iteration, or the degree of the polynomials.
        backward: ``"svd"`` takes the eigenvalues of the matrix, ``"lyapunov"`` those of its root,
            ``"lyapunov_iteration"`` none.
        backward_steps: of the iteration.
    """

    forward: RootForward
    backward: RootBackward
    order: int = 0
    backward_steps: int = 0


def matrix_root(a: Tensor, options: RootOptions) -> Tensor:
    """The root of positive semi-definite ``(..., m, m)``; zero for zero. It has no second derivative."""
    check_square("a", a)
    if options.forward == "svd" and options.backward != "lyapunov_iteration":
        # The eigenvalues of the value serve the gradient too, and give both equations the same solution.
        return matrix_power(a, 0.5)
    with autocast_off(a):
        a_Bmm = at_least_float32(a).reshape(-1, *a.shape[-2:])
        root_Bmm: Tensor = _MatrixRoot.apply(a_Bmm, options)  # type: ignore[no-untyped-call]
        return root_Bmm.reshape(a.shape)


def _value(a: Tensor, options: RootOptions) -> Tensor:
    if options.forward == "svd":
        of_a = spectrum(a)
        return of_a.assemble(of_a.values.sqrt())
    # Each matrix is divided by its own norm: one norm for a batch would make images depend on each other.
    unit = largest_entry(a)
    a = a * reciprocal_or_zero(unit)
    t = norm_of(a, "frobenius")
    a = a * reciprocal_or_zero(t)
    if options.forward == "newton_schulz":
        root, _ = newton_schulz(a, options.order)
    else:
        root = (pade_root if options.forward == "pade" else taylor_root)(a, options.order)
    return root * root_or_zero(t * unit)


def _gradient(a: Tensor, root: Tensor, grad: Tensor, options: RootOptions) -> Tensor:
    if options.backward == "svd":
        of_a = spectrum(a)
        return of_a.hadamard(reciprocal_of_sums(of_a.values.sqrt()), grad)
    if options.backward == "lyapunov":
        return solve_by_eigenvalues(root, grad)
    return solve_by_iteration(root, grad, options.backward_steps)


class _MatrixRoot(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, options: RootOptions) -> Tensor:
        with autocast_off(a):
            return _value(a, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, RootOptions], output: Tensor) -> None:
        a, ctx.options = inputs
        ctx.save_for_backward(a, output)

    @staticmethod
    @once_differentiable  # the gradient is not that of the computed value, so its own would mean nothing
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        a, root = ctx.saved_tensors
        grad = (grads[0] + grads[0].mT) * 0.5
        with autocast_off(a):
            return _gradient(a, root, grad, ctx.options), None
