"""The bare engine: the matrix products of ``isqrt_cov`` and nothing else, recorded and replayed.

The time of ``isqrt_cov`` above the bare engine is its overhead. ``isqrt_cov`` runs once under a dispatch
mode. Every product it makes, in value and gradient, is replayed as a ``torch.bmm`` of the same shapes and
strides, so that a transposed factor stays transposed.

Three choices make the comparison fair:

* Two products read the same memory here if and only if they do in the real run. One buffer for all products
  would stay in cache, which the iterates do not. A new pair per product would be colder than the iterates.
* Each result is a new tensor, as ``torch.bmm`` returns it, and is freed at once. The operator's cost of
  saving, adding and transposing results is overhead.
* A product that the operator accumulates into another matrix (``baddbmm``) is a plain ``torch.bmm`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.bench.contenders import OURS, Contender, Prepared
from lab.bench.layers import Problem

Factors = list[tuple[Tensor, Tensor]]


def replayable(products: list[Product], problem: Problem) -> Factors:
    """Return random factors with the shapes, strides and shared memory of the recorded products."""
    generator = torch.Generator().manual_seed(problem.seed)
    operands = [operand for product in products for operand in (product.left, product.right)]
    elements: dict[int, int] = {}
    for operand in operands:
        elements[operand.memory] = max(elements.get(operand.memory, 0), operand.elements)
    memories = {
        memory: torch.randn(count, generator=generator).to(problem.device)
        for memory, count in elements.items()
    }

    def factor(operand: Operand) -> Tensor:
        view = memories[operand.memory].as_strided(operand.shape, operand.stride)
        return view if view.ndim == 3 else view.unsqueeze(0)

    return [(factor(product.left), factor(product.right)) for product in products]


def replay(factors: Factors) -> None:
    """Compute every product once."""
    for left, right in factors:
        torch.bmm(left, right)


def _prepare(problem: Problem) -> Prepared:
    ours = OURS.prepare(problem)
    return Prepared(
        value=_replay_of(ours.value, problem),
        value_and_gradient=_replay_of(ours.value_and_gradient, problem),
    )


def _replay_of(run: Callable[[], object], problem: Problem) -> Callable[[], None]:
    return partial(replay, replayable(recorded_products(run), problem))


BARE = Contender("bare", "the matrix products of isqrt_cov as torch.bmm calls, and nothing else", _prepare)


# Positions of the two factors among the arguments of each operator that multiplies matrices.
_FACTORS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "addbmm": (1, 2),
    "addbmm_": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
}


@dataclass(frozen=True)
class Operand:
    """A factor of a product: its layout and its memory.

    Two operands with the same ``memory`` start at the same address: the same tensor, its transpose, or
    another tensor written over it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: int

    @property
    def elements(self) -> int:
        """Return the number of elements that it spans in memory."""
        return 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class Product:
    """One matrix product."""

    left: Operand
    right: Operand

    @property
    def multiplications(self) -> int:
        """Return the number of scalar multiplications: rows × inner × columns × batch."""
        count = self.right.shape[-1]
        for length in self.left.shape:
            count *= length
        return count


def recorded_products(run: Callable[[], object]) -> list[Product]:
    """Call ``run`` once, and return all its products, including those of the gradient if it computes one."""
    recorder = _ProductRecorder()
    with recorder:
        run()
    return recorder.products


class _ProductRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self._memories: dict[int, int] = {}
        # Tensors are held until the end: another tensor could get the address of a freed one.
        self._held: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        factors = _FACTORS.get(func.overloadpacket.__name__)
        if factors is not None:
            left, right = (args[position] for position in factors)
            self.products.append(Product(self._operand(left), self._operand(right)))
        return func(*args, **(kwargs or {}))

    def _operand(self, tensor: Tensor) -> Operand:
        self._held.append(tensor)
        memory = self._memories.setdefault(tensor.data_ptr(), len(self._memories))
        return Operand(tuple(tensor.shape), tensor.stride(), memory)
