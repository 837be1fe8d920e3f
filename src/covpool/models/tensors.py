"""The tensors of a bundle: those that its network should have, compared with those of its weights file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from covpool.errors import BundleError
from covpool.models.card import Card, reason, shown, versions
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.terminal import printable

# The limits of a stranger's network. Building the largest network of timm takes 60 thousand calls of torch.
MAX_CALLS = 250_000
# Buffers that are computed, not saved, take 2 MB in the networks of timm.
MAX_COMPUTED_BYTES = 2**30
FLOATS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


class _FewCalls(TorchFunctionMode):
    """Raise when a network has more layers than any of timm: even without memory, each takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise BundleError("its card describes a network of more layers than any network of timm has")
        return func(*args, **(kwargs or {}))


def planned_tensors(card: Card) -> dict[str, Tensor]:
    """Return the tensors that the weights file should have, on the meta device."""
    with explaining(card), torch.random.fork_rng(devices=[]), torch.device("meta"), _FewCalls():
        model = build_model(card.config)
    computed = sum(buffer.numel() * buffer.itemsize for _, buffer in _computed_buffers(model))
    if computed > MAX_COMPUTED_BYTES:
        raise BundleError(f"its network needs {computed / 2**30:.1f} GiB in addition to its weights")
    state: dict[str, Tensor] = model.state_dict()
    return state


@contextlib.contextmanager
def explaining(card: Card) -> Iterator[None]:
    """Turn every error of building a stranger's network into a BundleError."""
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
    """Raise unless the weights are those of the network: the same names, shapes and kinds of numbers."""
    for name in sorted(plan.keys() | tensors.keys()):
        found, wanted = _described(tensors.get(name)), _described(plan.get(name))
        if found != wanted:
            raise BundleError(f"{shown(name)} is {found} in its weights, {wanted} in the network of its card")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise if a weight is NaN or infinite: every prediction would be NaN."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            raise BundleError(
                f"{shown(name)} of its weights has NaN or infinite values: {count} of "
                f"{tensor.numel()}; train again, with a lower learning rate"
            )


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    kind = "float" if tensor.dtype in FLOATS.values() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {tuple(tensor.shape)}"


def fill(model: PooledClassifier, tensors: dict[str, Tensor], card: Card) -> None:
    """Copy the saved tensors into a new network, in their dtypes. Copies keep weights shared that were."""
    for name, own in model.state_dict(keep_vars=True).items():
        own.data = own.data.to(tensors[name].dtype)
    for name, buffer in _computed_buffers(model):
        if name in card.buffer_dtypes and buffer.is_floating_point():
            buffer.data = buffer.data.to(FLOATS[card.buffer_dtypes[name]])
    model.load_state_dict(tensors)


def tensors_of(model: PooledClassifier) -> dict[str, Tensor]:
    """Return the tensors to save, each contiguous, on the CPU, and in its own memory."""
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
    """Return the buffers that the network computes when it is built, which are not in its state."""
    state = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in state]


def computed_dtypes(model: PooledClassifier) -> dict[str, str]:
    """Return the dtypes of computed buffers where not float32: casting the model casts them too."""
    names = {dtype: name for name, dtype in FLOATS.items() if dtype != torch.float32}
    return {name: names[b.dtype] for name, b in _computed_buffers(model) if b.dtype in names}
