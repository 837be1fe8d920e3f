"""The number of calls that the layer dispatches, and that none of them waits for the host.

On a GPU, each call is a kernel launch of some microseconds. A call that reads a value on the host waits for
all kernels before it, and cannot be in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from covpool.nn import CovPool
from tests.functional.counting import product_operands

# Views and allocations launch nothing.
FREE = {"alias", "detach", "diagonal", "expand", "new_empty", "squeeze", "t", "transpose", "unbind"}
FREE |= {"unsqueeze", "view"}
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_dim"}
BOTH = {"positions": (256, 49), "channels": (64, 196)}
sides = pytest.mark.parametrize("side", BOTH)


class Calls(TorchDispatchMode):
    """Record the names of all operators that are dispatched inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if product_operands(func) is not None:
            self.products += 1
        elif name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def calls(layer: CovPool, x: Tensor, weights: Tensor | None = None) -> tuple[Calls, Calls]:
    x = x.clone().requires_grad_()
    layer(x, weights)  # fills the cache of triangle indices
    with Calls() as value:
        result = layer(x, weights)
    upstream = torch.randn_like(result)
    with Calls() as gradient:
        torch.autograd.grad(result, [x, *layer.parameters()], upstream)
    return value, gradient


def test_the_counter_counts() -> None:
    x = torch.ones(2, 2)
    with Calls() as found:
        (x + x.mT).sum().item()
        torch.bmm(x[None], x[None])
    assert found.names == ["add", "sum", "_local_scalar_dense"]
    assert found.products == 1


@sides
def test_calls_of_value_and_gradient(side: str) -> None:
    channels, positions = BOTH[side]
    layer = CovPool(channels, dim=None, layout="channels_first")
    value, gradient = calls(layer, torch.randn(2, channels, positions))
    more = {"positions": (3, 4), "channels": (1, 1)}[side]
    assert (value.products, gradient.products) == (6 + more[0], 8 + more[1])
    assert len(value.names) <= 30, value.names
    assert len(gradient.names) <= 23, gradient.names


@sides
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("reduction", [None, "convolution", "linear"])
def test_nothing_waits_for_the_host(side: str, kind: str, reduction: str | None) -> None:
    channels, positions = BOTH[side]
    options = {"dim": None} if reduction is None else {"dim": 48, "reduction": reduction}
    layer = CovPool(channels, layout="channels_first", **options)
    weights = {"none": None, "bool": torch.rand(2, positions) > 0.3, "float": torch.rand(2, positions)}[kind]
    for part in calls(layer, torch.randn(2, channels, positions), weights):
        assert not WAITS & set(part.names)


@pytest.mark.slow
@sides
def test_compiled_for_cuda_graphs_without_a_break(side: str) -> None:
    """``reduce-overhead`` uses CUDA graphs on a GPU; on a CPU it compiles the same graph."""
    channels, positions = BOTH[side]
    layer, x = CovPool(channels, dim=None, layout="channels_first"), torch.randn(2, channels, positions)
    weights = torch.rand(2, positions)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for arguments in ((x,), (x, weights)):
        leaf = x.clone().requires_grad_()
        result = compiled(leaf, *arguments[1:])
        result.sum().backward()
        torch.testing.assert_close(result, layer(*arguments), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["isqrt_cov", "gap", "cov", "cbp"])
def test_a_negative_weight_gives_nan_for_its_image_alone(method: str) -> None:
    x, weights = torch.randn(2, 4, 3, 3), torch.ones(2, 3, 3)
    weights[1, 0, 2] = -0.1
    for dim in (None, 3):
        layer = CovPool(4, method, dim=dim)
        vectors = layer(x, weights)
        assert vectors[0].isfinite().all()
        assert vectors[1].isnan().any()
        assert all(tensor.isfinite().all() for tensor in layer.state_dict().values())
