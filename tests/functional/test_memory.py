"""Memory saved for backward, at the size that the paper uses (d = 256, a 14×14 map)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covpool.functional import inverse_matrix_sqrt, isqrt_cov, matrix_sqrt

MIB = 2**20
MATRIX = 256 * 256 * 4  # bytes per image, in float32
FEATURES = 256 * 196 * 4
GRAM = 196 * 196 * 4
SMALL = 4096  # a few values per channel

sides = pytest.mark.parametrize("side", ["channels", "positions"])
backwards = pytest.mark.parametrize("backward", ["saved", "recompute"])


def kept_bytes(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes per image that the graph saves for backward, without the input itself."""
    x = x.clone().requires_grad_()
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(x)
    assert result.requires_grad
    storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values()) // x.shape[0]


class Allocations(TorchDispatchMode):
    """Track all memory allocated inside, by weak references, to see which of it is still alive afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    @property
    def alive_bytes(self) -> int:
        return sum({ref.cdata: size for ref, size in self._made if not ref.expired()}.values())


@pytest.fixture(scope="module")
def _frozen() -> Iterator[None]:
    """Freeze earlier objects, so that garbage collection skips them. It would take a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_garbage_collector(_frozen: None) -> Iterator[None]:
    """Disable the garbage collector, so that a reference cycle shows as live memory."""
    with Allocations():  # the first mean under a dispatch mode creates cycles in torch itself
        torch.zeros(2).mean()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(2, 256, 196)


@pytest.fixture(scope="module")
def small() -> Tensor:
    return torch.randn(2, 8, 9)


@pytest.fixture(scope="module")
def a() -> Tensor:
    half = torch.randn(2, 256, 300)
    return half @ half.mT


def test_saved(x: Tensor) -> None:
    """At most 1.9 MiB per image, with the iterates saved."""
    kept = kept_bytes(partial(isqrt_cov, iteration="paper"), x)
    assert kept <= 1.9 * MIB
    assert kept > 8 * GRAM
    assert kept_bytes(isqrt_cov, x) < kept  # the default has fewer steps


def test_recompute(x: Tensor) -> None:
    """At most 0.5 MiB per image: the centered features and no matrix."""
    kept = kept_bytes(partial(isqrt_cov, backward="recompute"), x)
    assert kept <= 0.5 * MIB
    assert kept <= FEATURES + SMALL


@backwards
def test_each_side_keeps_nothing_of_the_size_of_the_other(x: Tensor, backward: str) -> None:
    """No n×n matrix (such as the centering matrix) on the channels side, no C×C matrix on the other."""
    few_positions = x[..., :16].contiguous()
    assert kept_bytes(partial(isqrt_cov, side="positions", backward=backward), few_positions) < MATRIX
    few_channels = x[:, :16].contiguous()
    assert kept_bytes(partial(isqrt_cov, side="channels", backward=backward), few_channels) < GRAM


@pytest.mark.parametrize("root", [matrix_sqrt, inverse_matrix_sqrt])
def test_roots(root: Callable[..., Tensor], a: Tensor) -> None:
    """Eight iterates and the root are saved, or only the input with ``recompute``."""
    assert kept_bytes(root, a) <= 9 * MATRIX + SMALL
    assert kept_bytes(partial(root, backward="recompute"), a) <= SMALL


@sides
@backwards
@pytest.mark.parametrize(("requires_grad", "enabled"), [(True, False), (False, True), (False, False)])
@pytest.mark.usefixtures("no_garbage_collector")
def test_nothing_without_grad(
    small: Tensor, side: str, backward: str, requires_grad: bool, enabled: bool
) -> None:
    """Under no_grad, or for an input without gradient, no graph is built and no iterate outlives the call."""
    leaf = small.clone().requires_grad_(requires_grad)
    with torch.set_grad_enabled(enabled), Allocations() as allocations:
        result = isqrt_cov(leaf, side=side, backward=backward)
    assert result.grad_fn is None
    assert allocations.alive_bytes == result.untyped_storage().nbytes() == 2 * 8 * 8 * 4


@sides
@backwards
@pytest.mark.usefixtures("no_garbage_collector")
def test_graph_dies_with_the_result(small: Tensor, side: str, backward: str) -> None:
    """No reference cycle keeps the iterates alive until garbage collection."""
    leaf = small.clone().requires_grad_()
    with Allocations() as allocations:
        result = isqrt_cov(leaf, side=side, backward=backward)
    assert allocations.alive_bytes > 2 * 8 * 8 * 4
    del result
    assert allocations.alive_bytes == 0


@sides
@backwards
@pytest.mark.usefixtures("no_garbage_collector")
def test_backward_frees_the_iterates(small: Tensor, side: str, backward: str) -> None:
    """After backward only the result stays in memory, although it still has its graph."""
    leaf = small.clone().requires_grad_()
    with Allocations() as allocations:
        result = isqrt_cov(leaf, side=side, backward=backward)
    torch.autograd.grad(result, leaf, torch.ones_like(result))
    assert result.grad_fn is not None
    assert allocations.alive_bytes == 2 * 8 * 8 * 4
