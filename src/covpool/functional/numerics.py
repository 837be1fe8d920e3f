"""What all operators share: checks of tensors, precision, second derivatives, reuse of memory, norms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from covpool.errors import UsageError, UsageTypeError

Normalization = Literal["trace", "frobenius"]
Compensation = Literal["matched", "none"]
NORMALIZATIONS = ("trace", "frobenius")
COMPENSATIONS = ("matched", "none")


def check_floating(name: str, x: object) -> None:
    """Raise unless ``x`` is a real floating-point tensor."""
    if not isinstance(x, Tensor):
        maker = {"ndarray": "from_numpy", "list": "stack"}.get(type(x).__name__)
        remedy = f": pass torch.{maker}({name})" if maker else ""
        raise UsageTypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}{remedy}")
    if not x.is_floating_point() or x.dtype.itemsize < 2:  # float8 stores numbers, it does not compute
        raise UsageTypeError(
            f"{name} must be a real floating-point tensor; got {x.dtype}: pass {name}.float()"
        )


def check_features(x: Tensor) -> None:
    """Raise unless ``x`` is ``(..., C, n)`` with at least one channel and one position."""
    check_floating("x", x)
    if x.ndim < 2:
        raise UsageError(
            f"x must be (..., C, n), channels before positions; got shape {tuple(x.shape)}: "
            "flatten a feature map with x.flatten(-2), transpose tokens with x.mT"
        )
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        raise UsageError(
            f"x must have at least one channel and one position in (..., C, n); got {tuple(x.shape)}"
        )


def check_square(name: str, a: Tensor) -> None:
    """Raise unless ``a`` is ``(..., m, m)``."""
    check_floating(name, a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or a.shape[-1] == 0:
        raise UsageError(
            f"{name} must be square matrices (..., m, m); got shape {tuple(a.shape)}: "
            "covpool.functional.covariance makes them from features"
        )


def check_weights(weights: Tensor, x: Tensor) -> None:
    """Raise unless ``weights`` is bool or floating and ``(..., n)`` for ``x`` of ``(..., C, n)``.

    Values are not checked, because that would wait for the device: a negative weight gives NaN.
    """
    if not isinstance(weights, Tensor):
        raise UsageTypeError(f"weights must be a torch.Tensor; got {type(weights).__name__}")
    if weights.dtype != torch.bool and not weights.is_floating_point():
        raise UsageTypeError(
            f"weights must be bool or floating point; got {weights.dtype}: pass weights.bool() for a mask"
        )
    expected = (*x.shape[:-2], x.shape[-1])
    if tuple(weights.shape) != expected:
        raise UsageError(
            f"weights must be {expected}, one number for each position of x {tuple(x.shape)}; "
            f"got shape {tuple(weights.shape)}{weights_advice(weights, [expected])}"
        )
    if weights.device != x.device:
        raise UsageError(f"weights is on {weights.device} but x is on {x.device}: move one of them")


def weights_advice(weights: Tensor, accepted: Sequence[tuple[int, ...]]) -> str:
    """Return how to bring weights of another shape to an accepted one, after a colon; empty if unknown."""
    shape = tuple(weights.shape)
    if len(shape) > 1 and shape[1] == 1 and (shape[0], *shape[2:]) in accepted:
        return ": use weights.squeeze(1)"
    if any(shape in (full[1:], (1, *full[1:])) for full in accepted):
        return ": use weights.expand(...) to share one mask across the batch"
    return ""


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32; leave float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which every product runs in the dtype of its operands.

    ``torch.amp.custom_fwd`` does not work with ``setup_context``.
    """
    if x.device.type == "meta":  # autocast does not support it
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def needs_graph(*tensors: Tensor) -> bool:
    """Return whether the result of a backward or a jvp will be differentiated again.

    Saved iterates carry no derivative. Reusing them would give wrong second derivatives without an error, so
    they must be computed again from tensors that carry one.
    """
    return torch.is_grad_enabled() or any(map(is_dual, tensors))


def once_differentiable(gradient: Tensor, *sources: Tensor) -> Tensor:
    """Return the gradient so that differentiating it again raises.

    torch's decorator of this name checks the upstream gradient only. If that is a constant, a second
    derivative passes with this part missing.

    Args:
        gradient: the result of a backward, computed from tensors that carry no derivative.
        sources: the tensors with a derivative that it depends on.
    """
    if not needs_graph(gradient, *sources):
        return gradient
    refused: Tensor = _Refusal.apply(gradient, *sources)  # type: ignore[no-untyped-call]
    return refused


class _Refusal(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "this function can be differentiated only once; isqrt_cov can be differentiated twice"
        )


def may_overwrite(*tensors: Tensor) -> bool:
    """Return whether temporaries may be overwritten: eager mode, no autograd, no vmap, no tangents.

    Elementwise passes between two products spend most of their time on new memory.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return not any(_is_batched(tensor) or is_dual(tensor) for tensor in tensors)


def is_dual(tensor: Tensor) -> bool:
    """Return whether the tensor carries a tangent of forward mode."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def _is_batched(tensor: Tensor) -> bool:
    # torch has no public test for a tensor inside vmap; these are its internal ones.
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def buffers(like: Tensor, count: int) -> Iterator[Tensor | None]:
    """Yield ``count`` tensors shaped as ``like`` for ``out=``, from one allocation; None where not allowed.

    Many allocations would cost new memory pages at every training step.
    """
    if not may_overwrite(like):
        return repeat(None)
    return iter(like.new_empty(count, *like.shape).unbind())


def norm_of(a: Tensor, normalization: Normalization) -> Tensor:
    """Return ``tr(A)`` or ``‖A‖_F`` of each matrix, ``(B, 1, 1)``."""
    if normalization == "trace":
        return a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    norm: Tensor = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True)
    return norm


def reciprocal_or_zero(t: Tensor) -> Tensor:
    """Return ``1/t``, and 0 where t is 0, so that the zero matrix gives zero instead of NaN."""
    # As 1/Inf: a torch.where after 1/0 would have a NaN derivative.
    return t.masked_fill(t == 0, torch.inf).reciprocal()


def root_or_zero(t: Tensor) -> Tensor:
    """Return ``√t`` with a derivative of 0 at 0 instead of infinity."""
    zero = t == 0
    return t.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def largest_entry(a: Tensor) -> Tensor:
    """Return the largest absolute entry, ``(..., 1, 1)``, as a constant of the derivative.

    After division by it, no square of an entry overflows. It is zero for subnormal matrices, whose largest
    entry has no reciprocal.
    """
    largest = a.detach().abs().amax((-2, -1), keepdim=True)
    return largest.masked_fill(largest < torch.finfo(a.dtype).tiny, 0.0)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``x · factor``; x may be overwritten."""
    return x.mul_(factor) if may_overwrite(x, factor) else x * factor


def norm_jvp(tangent: Tensor, a: Tensor, normalization: Normalization) -> Tensor:
    """Return the directional derivative of t along ``tangent``, given ``A = S/t``."""
    if normalization == "trace":
        return norm_of(tangent, "trace")
    return (tangent * a).sum((-2, -1), keepdim=True)


def signed_root(p: Tensor, *, eps: float = 0.0) -> Tensor:
    r""":math:`\operatorname{sign}(p) (\sqrt{|p| + \epsilon} - \sqrt\epsilon)` of every entry.

    Without ε the derivative is unbounded near zero; at zero it is defined as zero.

    Example:
        >>> signed_root(torch.tensor([4.0, 0.0, -9.0]))
        tensor([ 2.,  0., -3.])
        >>> signed_root(torch.tensor([3.0, 0.0, -8.0]), eps=1.0)
        tensor([ 1.,  0., -2.])
    """
    if eps:
        # Equal to the formula, without cancellation.
        return p / ((p.abs() + eps).sqrt() + math.sqrt(eps))
    return p.sign() * root_or_zero(p.abs())


def l2_normalized(v: Tensor) -> Tensor:
    r""":math:`v / \|v\|_2` over the last dimension, whatever the scale of v; zero for zero.

    A vector of only subnormal values counts as zero.

    Example:
        >>> l2_normalized(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    v = in_units_of_largest(v.unsqueeze(-2)).squeeze(-2)
    norm: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v * reciprocal_or_zero(norm)


def in_units_of_largest(x: Tensor) -> Tensor:
    """Return ``x`` divided by the largest absolute entry of its last two dimensions; zero for zero.

    The divisor is a constant of the derivative. So the derivative is correct only for functions that do not
    depend on the scale of x.
    """
    return x * reciprocal_or_zero(largest_entry(x))


def in_units_of_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` divided by the Frobenius norm of its last two dimensions, and the norm, a constant.

    Zero gives zero. The largest entry comes first, so that no square overflows.
    """
    largest = largest_entry(x)
    norm = norm_of(x.detach() * reciprocal_or_zero(largest), "frobenius") * largest
    return x * reciprocal_or_zero(norm), norm
