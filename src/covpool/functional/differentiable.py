"""Tools for differentiable operators: precision, second derivatives, reuse of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad


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
            "this pooling method can be differentiated only once; isqrt_cov can be differentiated twice"
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
