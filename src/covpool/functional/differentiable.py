"""Helpers of differentiable operators: autocast, graph needs, once-differentiable functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 pass through untouched."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Inside, every product runs in the dtype of its operands, whatever autocast says outside.

    ``torch.amp.custom_fwd`` would be the usual tool; it does not work with ``setup_context``.
    """
    if x.device.type == "meta":  # shapes alone: there is nothing to cast, and autocast does not know it
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def needs_graph(*tensors: Tensor) -> bool:
    """Whether someone will differentiate what is being computed inside a backward or a jvp.

    Saved iterates carry no derivative of their own. Reusing them then would give second derivatives
    that are wrong without an error, so they must be computed anew from tensors that do carry one.
    """
    return torch.is_grad_enabled() or any(map(_is_dual, tensors))


def once_differentiable(gradient: Tensor, *sources: Tensor) -> Tensor:
    """A gradient made of tensors that carry no derivative; differentiating it again raises.

    torch's decorator of this name looks at the upstream gradient alone, and where that is a constant lets
    a second derivative pass with this part of it missing.

    Args:
        gradient: what a backward is about to return.
        sources: tensors that do carry a derivative, and that it depends on.
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
            "this pooling method can be differentiated once; matrix_sqrt and isqrt_cov can be twice"
        )


def may_overwrite(*tensors: Tensor) -> bool:
    """Whether temporaries may be reused in place: eager mode, nobody recording, no vmap, no tangents.

    Fresh memory is what the elementwise passes between two products spend most of their time on.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return not any(_is_batched(tensor) or _is_dual(tensor) for tensor in tensors)


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _is_batched(tensor: Tensor) -> bool:
    # There is no public way to ask whether a tensor is wrapped by vmap; these are what torch asks.
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def buffers(like: Tensor, count: int) -> Iterator[Tensor | None]:
    """``count`` tensors shaped as ``like`` for ``out=``, out of one allocation; None where forbidden.

    One allocation, because a process pays for every fresh page once more at each training step.
    """
    if not may_overwrite(like):
        return repeat(None)
    return iter(like.new_empty(count, *like.shape).unbind())
