"""Read and write the tensors of a bundle."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import timm
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from covpool import __version__
from covpool.errors import BundleError
from covpool.models.card import FLOATS, Card
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.models.strict_json import printable, reason, shown

# The largest network of timm takes 60 thousand calls of torch to be built.
MAX_CALLS = 250_000
# Buffers that are computed, not saved: 2 MB in timm's networks.
MAX_COMPUTED_BYTES = 2**30


class _FewCalls(TorchFunctionMode):
    """Raise when more is built than any network has: on the meta device a tensor is cheap, not free."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise BundleError("its card describes a network of more layers than any network of timm has")
        return func(*args, **(kwargs or {}))


def planned_tensors(card: Card) -> dict[str, Tensor]:
    """The tensors that the weights' file should have, without memory behind them."""
    with explaining(card), torch.random.fork_rng(devices=[]), torch.device("meta"), _FewCalls():
        model = build_model(card.config)
    state: dict[str, Tensor] = model.state_dict()
    computed = sum(buffer.numel() * buffer.itemsize for _, buffer in _computed_buffers(model))
    if computed > MAX_COMPUTED_BYTES:
        raise BundleError(f"its network needs {computed / 2**30:.1f} GiB beside its weights")
    return state


@contextlib.contextmanager
def explaining(card: Card) -> Iterator[None]:
    """Any error of building what a stranger's card describes is a reason to refuse it."""
    try:
        yield
    except BundleError:
        raise
    except Exception as error:
        there, here = (
            ", ".join(f"{k} {v}" for k, v in sorted(x.items())) for x in (card.versions, versions())
        )
        hint = "" if there == here else f" (saved with {printable(there)}; here are {here})"
        raise BundleError(f"its network cannot be built: {reason(error)}{hint}") from error


def check_tensors(tensors: Mapping[str, Tensor], plan: Mapping[str, Tensor]) -> None:
    """Raise unless the weights are those of the network, name by name."""
    if missing := plan.keys() - tensors.keys():
        raise BundleError(
            f"the network of its card has {shown(min(missing))}, which is not among its weights"
        )
    if unknown := tensors.keys() - plan.keys():
        raise BundleError(f"its weights have {shown(min(unknown))}, which is not in the network of its card")
    for name, wanted in plan.items():
        found = tensors[name]
        if found.shape != wanted.shape:
            there, here = tuple(found.shape), tuple(wanted.shape)
            raise BundleError(f"{name!r} has shape {there} in its weights, {here} in the network of its card")
        both = (found.dtype, wanted.dtype)
        if found.dtype != wanted.dtype and not set(both) <= set(FLOATS.values()):
            raise BundleError("{!r} is {} in its weights, {} in the network of its card".format(name, *both))


def fill(model: PooledClassifier, tensors: dict[str, Tensor], card: Card) -> None:
    """The saved tensors into a new network, each in its saved dtype.

    They are copied, not put in the place of the network's own: weights that are one tensor under two names
    stay one.
    """
    for name, own in model.state_dict(keep_vars=True).items():
        own.data = own.data.to(tensors[name].dtype)
    for name, buffer in _computed_buffers(model):
        if name in card.buffer_dtypes and buffer.is_floating_point():
            buffer.data = buffer.data.to(FLOATS[card.buffer_dtypes[name]])
    model.load_state_dict(tensors)


def tensors_of(model: PooledClassifier) -> dict[str, Tensor]:
    """All that is to be saved, each tensor contiguous, in the CPU's memory, and apart from the others."""
    result, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor or tensor.is_meta or tensor.layout != torch.strided:
            raise BundleError(
                f"{name!r} is not an ordinary tensor: gather or convert the weights before saving"
            )
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        result[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return result


def _computed_buffers(model: PooledClassifier) -> list[tuple[str, Tensor]]:
    """Buffers that are no part of the state: the network computes them when it is built."""
    state = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in state]


def computed_dtypes(model: PooledClassifier) -> dict[str, str]:
    """The dtypes of computed buffers, where not float32: a cast of the model casts them too."""
    names = {dtype: name for name, dtype in FLOATS.items()}
    return {
        name: names[buffer.dtype]
        for name, buffer in _computed_buffers(model)
        if buffer.dtype in names and buffer.dtype != torch.float32
    }


def versions() -> dict[str, str]:
    """Of what a network is built with."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "covpool": __version__,
    }
