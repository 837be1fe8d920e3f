"""The bare engine: the products that ``isqrt_cov`` makes, and nothing else.

How far ``isqrt_cov`` is above it is its overhead. The list is not written down by hand: ``isqrt_cov``
runs once under a dispatch mode, and every product it makes, in value and gradient, is replayed as a
``torch.bmm`` of the same shapes and strides (so that a transposed factor stays transposed).

Three choices make the comparison fair rather than flattering:

* Factors lie in as many places of memory as in the real run: two products read the same place here
  exactly where they do there. One hot buffer for all would sit in cache, as the iterates do not; a
  fresh pair for each product would be colder than the iterates are.
* Each result is a fresh tensor, as ``torch.bmm`` returns it, let go at once. What the operator pays
  to keep, add and transpose results is its overhead, not the engine's.
* A product that the operator accumulates into another matrix (``baddbmm``) is a plain ``torch.bmm``
  here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from covpool.bench.contenders.contender import Contender, Prepared
from covpool.bench.contenders.ours import OURS
from covpool.bench.problem import Problem
from covpool.bench.products import Operand, Product, recorded_products

Factors = list[tuple[Tensor, Tensor]]


def replayable(products: list[Product], problem: Problem) -> Factors:
    """Factors with the shapes, strides and sharing of the recorded products, filled with noise."""
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
    """Every product once."""
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
