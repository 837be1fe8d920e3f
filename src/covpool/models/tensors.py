"""The tensors of a bundle: which ones its card plans, which ones its files have, and whether they agree."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from covpool.errors import BundleError
from covpool.models.card import CARD, Card, reason, shown, versions
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.storage.files import open_regular
from covpool.terminal import printable

# The header of a weights file: the limit of safetensors itself.
MAX_HEADER_BYTES = 100_000_000
# The limits of a stranger's network. Building the largest network of timm takes 60 thousand calls of torch.
MAX_CALLS = 250_000
# Buffers that are computed, not saved, take 2 MB in the networks of timm.
MAX_COMPUTED_BYTES = 2**30
FLOATS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


@contextlib.contextmanager
def naming(folder: str | Path) -> Iterator[None]:
    """Put the name of the folder before the reason."""
    try:
        yield
    except BundleError as error:
        raise type(error)(f"bundle {str(folder)!r}: {error}") from error.__cause__


def open_file(folder: Path, name: str) -> io.FileIO:
    """Open a file of a bundle. Links are followed: the caches of model hubs consist of them.

    A link cannot reveal a file: its content must have the hash of the card, and no message quotes it.
    """
    path = folder / name
    if not folder.is_dir():
        what = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        raise BundleError(f"{what}: {_meant(folder.parent)}")
    if not path.exists():
        raise BundleError(f"there is no {name} in it: {_meant(folder)}")
    try:
        return open_regular(path)
    except OSError as error:
        raise BundleError(f"its {name} cannot be opened: {error.strerror or error}") from error


def _meant(run: Path) -> str:
    """Suggest the bundles in the folder of a run or of a comparison."""
    inside = [run / "bundle", *sorted(run.glob("*/bundle"))]
    bundles = [str(path) for path in inside if (path / CARD).exists()]
    return f"did you mean {' or '.join(bundles[:2])}?" if bundles else "pass the folder bundle of a run"


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
    computed = sum(buffer.numel() * buffer.itemsize for _, buffer in computed_buffers(model))
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
        stored, expected = _described(tensors.get(name)), _described(plan.get(name))
        if stored != expected:
            raise BundleError(
                f"{shown(name)} is {stored} in its weights, {expected} in the network of its card"
            )


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


def computed_buffers(model: PooledClassifier) -> list[tuple[str, Tensor]]:
    """Return the buffers that the network computes when it is built, which are not in its state."""
    state = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in state]
