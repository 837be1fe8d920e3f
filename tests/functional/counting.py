"""Count matrix products and their multiplications."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Names without the overload and without the underscore of in-place forms, so bmm.out and baddbmm_ count too.
# matmul, einsum and linear are dispatched to these operators.
PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "dot": (0, 1),
    "vdot": (0, 1),
}


def product_operands(target: Any) -> tuple[int, int] | None:
    """Return the indices of the two matrix arguments that an aten operator multiplies, or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return PRODUCTS.get(target._schema.name.removeprefix("aten::").rstrip("_"))


class Products(TorchDispatchMode):
    """Count all matrix products inside the context, including those of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = product_operands(func)
        if operands is not None:
            left, right = (args[i] for i in operands)
            self.count += 1
            columns = right.shape[-1] if right.ndim > 1 else 1
            self.multiplications += left.numel() * columns
        return func(*args, **(kwargs or {}))


def count_value_and_gradient(function: Any, x: Tensor) -> tuple[Products, Products]:
    """Return the products of ``function(x)`` and of its gradient."""
    x = x.clone().requires_grad_()
    with Products() as value:
        result = function(x)
    upstream = torch.randn_like(result)
    with Products() as gradient:
        torch.autograd.grad(result, x, upstream)
    return value, gradient
