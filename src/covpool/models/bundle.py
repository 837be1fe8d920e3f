"""Load bundles: a folder with the weights, ``model.safetensors``, and a card, ``covpool.json``.

A bundle may come from a stranger. Loading it must not run code, read or fetch other files, or exhaust the
memory before its size is checked, and it must not load damaged weights silently. So the card is checked
first, its network is built without memory, the weights must have the size and the hash of the card, and only
then is the network built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from covpool.device import chosen_device
from covpool.durable import read_folder
from covpool.errors import BundleError, DamagedBundleError
from covpool.hub import COMMIT, HUB, HubAddress
from covpool.models.card import (
    CARD,
    INDEX,
    MAX_BYTES,
    WEIGHTS,
    Card,
    backbone_digest,
    read_fields,
    reason,
    shown,
    versions,
)
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.terminal import printable

T = TypeVar("T")

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


def load_model(
    folder: str | Path, *, device: str | torch.device = "cpu", backbone: PooledClassifier | None = None
) -> PooledClassifier:
    """Load a bundle: the model in evaluation mode, with its weights, class names and preprocessing.

    Loading takes twice the memory of the model for a moment, and draws no random numbers. A sharded
    classifier that does not fit stays on the disk: the model then predicts, and cannot be trained.

    Args:
        folder: the bundle: a folder, or ``"hf-hub:user/name"`` or ``"hf-hub:user/name@revision"`` on the
            Hugging Face Hub.
        device: device of the model; ``"auto"`` uses a GPU if there is one.
        backbone: a loaded model with the same backbone. Both models then share it, in memory and on its
            device, so that many heads need one backbone.

    Raises:
        BundleError: there is no bundle, or it is refused; the message says why. Also if the head belongs to
            another backbone.
        HubError: the Hub does not give the bundle.
        UsageError: if there is no such device.
    """
    device = chosen_device(device)
    with naming(folder), torch.random.fork_rng(devices=[]):
        card, tensors, classifier = located(folder, _read)
        classes = card.config.num_classes
        config = card.config if classifier is None else dataclasses.replace(card.config, num_classes=0)
        with explaining(card), torch.device("cpu"):
            model = build_model(config)
            fill(model, tensors, card)
        if classifier is not None:
            model.head.classifier, model.num_classes = classifier, classes
            model.config = dataclasses.replace(model.config, num_classes=classes)
    model.classes, model.initial_weights = card.classes, card.initial_weights
    # The preprocessing of training, even if another timm has other defaults for this backbone.
    model.pretrained_cfg.update(card.preprocessing)
    if backbone is not None:
        with naming(folder):
            if backbone_digest(backbone) != (card.backbone_sha256 or backbone_digest(model)):
                raise BundleError("its head belongs to another backbone: load it without backbone=")
        model.backbone, device = backbone.backbone, next(backbone.parameters()).device
    return model.eval().to(device)


def read_card(folder: str | Path) -> Card:
    """Read the card of a bundle and check the hashes of both files; no network is built.

    Raises:
        BundleError: there is no bundle, or it is refused; the message says why.
    """

    def read(path: Path) -> Card:
        with _open_weights(path) as (card, file):
            _check_sha256(hashlib.file_digest(file, "sha256").hexdigest(), card)
        if card.file == INDEX:
            from covpool.models.shards import check_hashes, read_index

            check_hashes(path, read_index(path, card))
        return card

    with naming(folder):
        return located(folder, read)


@contextlib.contextmanager
def naming(folder: str | Path) -> Iterator[None]:
    """Put the name of the folder before the reason."""
    try:
        yield
    except BundleError as error:
        raise type(error)(f"bundle {str(folder)!r}: {error}") from error.__cause__


def _read(folder: Path) -> tuple[Card, dict[str, Tensor], nn.Module | None]:
    """Return card and weights, and a classifier in place of its weights if these do not fit into memory."""
    with _open_weights(folder) as (card, file):
        plan = planned_tensors(card)
        if card.file == INDEX:
            from covpool.models.shards import read_shards

            return card, *read_shards(folder, card, plan)
        # A huge file of zeros takes no space on a disk, but would in memory.
        if card.bytes > MAX_HEADER_BYTES + sum(8 * tensor.numel() for tensor in plan.values()):
            raise BundleError(f"{WEIGHTS} is far larger than the network of its card")
        data = file.read(card.bytes)
    _check_sha256(hashlib.sha256(data).hexdigest(), card)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:
        raise BundleError(f"{WEIGHTS} is not a safetensors file: {reason(error)}") from error
    check_tensors(tensors, plan)
    check_finite(tensors)
    return card, tensors, None


@contextlib.contextmanager
def _open_weights(folder: Path) -> Iterator[tuple[Card, BufferedReader]]:
    """Open the weights of a bundle after checking its card, and that they have the size of the card."""
    with open_file(folder, CARD) as file:
        card = read_fields(file.read(MAX_BYTES + 1))
    with open_file(folder, card.file) as file:
        size = os.fstat(file.fileno()).st_size
        if size != card.bytes:
            what = "is truncated" if size < card.bytes else "belongs to another card"
            raise DamagedBundleError(
                f"{card.file} {what}, {size} bytes instead of {card.bytes}: copy both files again"
            )
        yield card, file


def open_file(folder: Path, name: str) -> BufferedReader:
    """Open a file of a bundle. Links are followed: the caches of model hubs consist of them.

    A link cannot reveal a file: its content must have the hash of the card, and no message quotes it.
    """
    path = folder / name
    if not folder.is_dir():
        what = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        raise BundleError(f"{what}: {_meant(folder.parent)}")
    if not path.exists():
        raise BundleError(f"there is no {name} in it: {_meant(folder)}")
    if not path.is_file():  # a device or a pipe, which never end
        raise BundleError(f"its {name} is not a file")
    try:
        return path.open("rb")
    except OSError as error:
        raise BundleError(f"its {name} cannot be opened: {error.strerror}") from error


def _meant(run: Path) -> str:
    """Suggest the bundles in the folder of a run or of a comparison."""
    inside = [run / "bundle", *sorted(run.glob("*/bundle"))]
    found = [str(path) for path in inside if (path / CARD).exists()]
    return f"did you mean {' or '.join(found[:2])}?" if found else "pass the folder bundle of a run"


def _check_sha256(found: str, card: Card) -> None:
    if found != card.sha256:
        raise DamagedBundleError(
            f"{card.file} is damaged or belongs to another card (its hash differs): copy both again"
        )


def located(bundle: str | Path, read: Callable[[Path], T]) -> T:
    """Read a bundle in a folder, or the copy on this disk of one on the Hub."""
    if not str(bundle).startswith(HUB):
        return read_folder(bundle, read)
    address = HubAddress.of(str(bundle))
    try:
        return read(download(address))
    except DamagedBundleError:  # the copy, perhaps, and not the original
        return read(download(address, again=True))


def pinned(bundle: str | Path) -> str:
    """Return how another process finds the same bundle: its absolute path, or its address with a commit."""
    if not str(bundle).startswith(HUB):
        return str(Path(bundle).resolve())
    address = HubAddress.of(str(bundle))
    is_pinned = COMMIT.fullmatch(address.revision)
    return str(address if is_pinned else dataclasses.replace(address, revision=download(address).name))


def download(address: HubAddress, *, again: bool = False) -> Path:
    """Return the folder of a bundle in the cache, after downloading the files that are not there."""
    card = address.file(CARD, again=again)
    # The weights of the same commit, even if another is pushed meanwhile.
    dataclasses.replace(address, revision=card.parent.name).file(WEIGHTS, again=again)
    return card.parent


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
    for name, buffer in computed_buffers(model):
        if name in card.buffer_dtypes and buffer.is_floating_point():
            buffer.data = buffer.data.to(FLOATS[card.buffer_dtypes[name]])
    model.load_state_dict(tensors)


def computed_buffers(model: PooledClassifier) -> list[tuple[str, Tensor]]:
    """Return the buffers that the network computes when it is built, which are not in its state."""
    state = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in state]
