"""Which matrix products a piece of code really makes, by watching torch dispatch them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Where the two factors stand among the arguments of each operator that multiplies matrices.
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
    """A factor of a product: how it is laid out, and which memory it reads.

    Two operands with the same ``memory`` start at the same place: the same tensor, its transpose, or
    another one written over it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: int

    @property
    def elements(self) -> int:
        """How much memory it spans."""
        return 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class Product:
    """One matrix product."""

    left: Operand
    right: Operand

    @property
    def multiplications(self) -> int:
        """Scalar multiplications: rows × inner × columns × batch."""
        count = self.right.shape[-1]
        for length in self.left.shape:
            count *= length
        return count


def recorded_products(run: Callable[[], object]) -> list[Product]:
    """Run once and list every product made on the way, gradient included if ``run`` computes it."""
    recorder = _ProductRecorder()
    with recorder:
        run()
    return recorder.products


class _ProductRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self._memories: dict[int, int] = {}
        # Held until the end: freed memory would come back under the same address as another tensor.
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
