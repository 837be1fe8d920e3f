"""Memory that autograd keeps between a value and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def bytes_kept_for_backward(
    pool: Callable[[Tensor], object], features: Tensor, besides: Iterable[Tensor] = ()
) -> int:
    """Bytes held for the gradient of ``pool(features)``, the features themselves left out.

    Every tensor that autograd saves passes through a hook. Tensors that share a storage are counted
    once, with the whole storage, because the whole storage is what stays in memory. What is there
    ``besides``, such as a layer's parameters, is not counted: it is there with or without a gradient.
    """
    leaf = features.detach().requires_grad_()
    # The tensors are held, so that no storage is freed and its address given to another.
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, _same):
        result = pool(leaf)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    for tensor in (leaf, *besides):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(storages.values())


def _same(tensor: Tensor) -> Tensor:
    return tensor
