"""Load bundles: a folder with the weights, ``model.safetensors``, and a card, ``covpool.json``.

A bundle may come from a stranger. Loading it must not run code, read or fetch other files, or exhaust the
memory before its size is checked, and it must not load damaged weights silently. So the card is checked
first, its network is built without memory, the weights must have the size and the hash of the card, and only
then is the network built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from covpool.device import chosen_device
from covpool.errors import BundleError, DamagedBundleError
from covpool.hub import COMMIT, HUB, HubAddress
from covpool.models.card import CARD, INDEX, MAX_BYTES, WEIGHTS, Card, backbone_digest, read_fields, reason
from covpool.models.create import build_model
from covpool.models.divided import check_hashes, read_index, read_parts, read_tensors
from covpool.models.model import PooledClassifier
from covpool.models.tensors import (
    FLOATS,
    MAX_HEADER_BYTES,
    check_finite,
    check_tensors,
    computed_buffers,
    explaining,
    naming,
    open_file,
    planned_tensors,
)
from covpool.nn.divided import DividedLinear
from covpool.processes import Processes
from covpool.storage.files import digest, digest_file, read_file
from covpool.storage.folders import read_folder

T = TypeVar("T")


def load_model(
    folder: str | Path, *, device: str | torch.device = "cpu", backbone: PooledClassifier | None = None
) -> PooledClassifier:
    """Load a bundle: the model in evaluation mode, with its weights, class names and preprocessing.

    Loading takes twice the memory of the model for a moment, and draws no random numbers. A divided
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
            if backbone_digest(backbone) != card.backbone_sha256:
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
            _check_sha256(digest_file(file), card)
        if card.file == INDEX:
            check_hashes(path, read_index(path, card))
        return card

    with naming(folder):
        return located(folder, read)


def _read(folder: Path) -> tuple[Card, dict[str, Tensor], nn.Module | None]:
    """Return card and weights, and a classifier in place of its weights if these do not fit into memory."""
    with _open_weights(folder) as (card, file):
        plan = planned_tensors(card)
        if card.file == INDEX:
            return card, *read_parts(folder, card, plan)
        # A huge file of zeros takes no space on a disk, but would in memory.
        if card.bytes > MAX_HEADER_BYTES + sum(8 * tensor.numel() for tensor in plan.values()):
            raise BundleError(f"{WEIGHTS} is far larger than the network of its card")
        data = file.readall()
    _check_sha256(digest(data), card)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:
        raise BundleError(f"{WEIGHTS} is not a safetensors file: {reason(error)}") from error
    check_tensors(tensors, plan)
    check_finite(tensors)
    return card, tensors, None


@contextlib.contextmanager
def _open_weights(folder: Path) -> Iterator[tuple[Card, io.FileIO]]:
    """Open the weights of a bundle after checking its card, and that they have the size of the card."""
    with open_file(folder, CARD) as file:
        card = read_fields(file.read(min(MAX_BYTES, os.fstat(file.fileno()).st_size) + 1))
    with open_file(folder, card.file) as file:
        size = os.fstat(file.fileno()).st_size
        if size != card.bytes:
            what = "is truncated" if size < card.bytes else "belongs to another card"
            raise DamagedBundleError(
                f"{card.file} {what}, {size} bytes instead of {card.bytes}: copy both files again"
            )
        yield card, file


def _check_sha256(sha256: str, card: Card) -> None:
    if sha256 != card.sha256:
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


def fill(model: PooledClassifier, tensors: dict[str, Tensor], card: Card) -> None:
    """Copy the saved tensors into a new network, in their dtypes. Copies keep weights shared that were."""
    for name, parameter in model.state_dict(keep_vars=True).items():
        parameter.data = parameter.data.to(tensors[name].dtype)
    for name, buffer in computed_buffers(model):
        if name in card.buffer_dtypes and buffer.is_floating_point():
            buffer.data = buffer.data.to(FLOATS[card.buffer_dtypes[name]])
    model.load_state_dict(tensors)


def load_together(model: PooledClassifier, folder: Path, processes: Processes) -> None:
    """Load the weights of a bundle; all processes call it. Each reads its rows of a divided classifier."""
    classifier = model.head.classifier
    if not isinstance(classifier, DividedLinear):
        model.load_state_dict(processes.tensors_by_first(lambda: load_model(folder).state_dict()))
        return

    def read() -> dict[str, Tensor]:
        card = read_fields(read_file(folder / CARD, MAX_BYTES))
        return read_tensors(folder, read_index(folder, card), classifier.rows)

    processes.by_first(lambda: read_card(folder))  # checks the hashes
    model.load_state_dict(processes.together(read))
