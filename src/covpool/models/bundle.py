"""Save and load bundles: a folder with the weights, ``model.safetensors``, and a card, ``covpool.json``.

A bundle may come from a stranger. Loading it must not run code, read or fetch other files, or exhaust the
memory before its size is checked, and it must not load damaged weights silently. So the card is checked
first, its network is built without memory, the weights must have the size and the hash of the card, and only
then is the network built. A kill while saving leaves the old bundle or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import safetensors.torch
import timm.data
import torch
from torch import Tensor, nn

from covpool.device import chosen_device
from covpool.durable import read_folder, replace_folder, write_file
from covpool.errors import BundleError, DamagedBundleError, UsageTypeError
from covpool.hub import HUB
from covpool.models.card import (
    CARD,
    INDEX,
    MAX_BYTES,
    WEIGHTS,
    Card,
    backbone_digest,
    read_fields,
    reason,
    versions,
    write_card,
)
from covpool.models.create import build_model
from covpool.models.hub import located
from covpool.models.model import PooledClassifier
from covpool.models.tensors import (
    check_finite,
    check_tensors,
    computed_dtypes,
    explaining,
    fill,
    planned_tensors,
    tensors_of,
)
from covpool.nn.cov_pool import drop_unused_norm

__all__ = ["BundleError", "Card", "load_model", "read_card", "save_model"]

# The header of a weights file: the limit of safetensors itself.
MAX_HEADER_BYTES = 100_000_000
# The files of a sharded classifier.
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_model(
    model: PooledClassifier,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model as a bundle.

    Every parameter and buffer keeps its bits and its dtype. Which parameters are frozen is not saved. An
    existing bundle is replaced once the new one is on the disk: a kill or a full disk leaves the old one.

    Args:
        model: from :func:`covpool.create_model`.
        folder: a new or empty folder, or a bundle to replace.
        classes: names of the classes, in the order of the logits; ``None`` for the model's own ``classes``.
        metrics: measurements: numbers, strings, lists and dicts. NaN and infinities become ``null``.
        recipe: training settings, of the same types.

    Returns:
        The folder.

    Raises:
        BundleError: the folder has other files, or the model differs from its ``config``.

    Example:
        >>> import tempfile
        >>> from covpool.models import create_model
        >>> model = create_model("test_resnet", dim=8, num_classes=2)
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = save_model(model, f"{parent}/birds", classes=["jay", "wren"], metrics={"top1": 0.9})
        ...     load_model(folder).classes, read_card(folder).metrics
        (('jay', 'wren'), {'top1': 0.9})
    """
    if not isinstance(model, PooledClassifier):
        raise UsageTypeError(
            f"model must come from covpool.create_model; got {type(model).__name__}: "
            "pass the wrapped model itself (DDP: model.module, torch.compile: model._orig_mod)"
        )
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes or ()):
        raise UsageTypeError("classes must be a list of strings, one for each class")
    check_replaceable(folder)
    with _naming(folder):
        tensors = tensors_of(model)
        weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
        classes = model.classes if classes is None else classes
        card = card_of(model, weights, classes=classes, metrics=metrics or {}, recipe=recipe or {})
        text = write_card(card)
        check_finite(tensors)
        try:
            check_tensors(tensors, planned_tensors(card))
        except BundleError as error:
            raise BundleError(
                f"the model changed after it was created, and would not load: {error}"
            ) from error
    with replace_folder(folder) as new:
        write_file(new / WEIGHTS, weights)
        write_file(new / CARD, text)
    return Path(folder)


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
    with _naming(folder), torch.random.fork_rng(devices=[]):
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
        with _naming(folder):
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

    with _naming(folder):
        return located(folder, read)


def check_replaceable(folder: str | Path) -> None:
    """Raise BundleError where :func:`save_model` would not write: before hours of work.

    The folder must not exist, be empty, or be a bundle without other files: its content is replaced.
    """

    def check(path: Path) -> None:
        if str(folder).startswith(HUB):
            raise BundleError("it is on the Hub: save to a folder, then use covpool push FOLDER user/name")
        if path.exists() and not path.is_dir():
            raise BundleError("a file of this name exists")
        found = {file.name for file in path.iterdir()} if path.exists() else set()
        own = {name for name in found if name in (CARD, WEIGHTS, INDEX) or SHARD.fullmatch(name)}
        if others := sorted(found - own if CARD in found else found):
            raise BundleError(
                f"the folder holds other files, such as {others[0]!r}: save to a new or empty folder"
            )

    with _naming(folder):
        read_folder(folder, check)


def check_savable(model: PooledClassifier) -> None:
    """Raise BundleError where :func:`save_model` would refuse the model: before hours of training."""
    write_card(card_of(model, b"", classes=model.classes, metrics={}, recipe={}))


@contextlib.contextmanager
def _naming(folder: str | Path) -> Iterator[None]:
    """Put the name of the folder before the reason."""
    try:
        yield
    except BundleError as error:
        raise type(error)(f"bundle {str(folder)!r}: {error}") from error.__cause__


def card_of(model: PooledClassifier, weights: bytes, **given: Any) -> Card:
    """Return the card of a model and the content of its weights file."""
    return Card(
        config=model.config,
        preprocessing=timm.data.resolve_model_data_config(model),
        versions=versions(),
        initial_weights=model.initial_weights,
        sha256=hashlib.sha256(weights).hexdigest(),
        bytes=len(weights),
        buffer_dtypes=computed_dtypes(model),
        backbone_sha256=backbone_digest(model),
        **given,
    )


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
    if "pool.reduction.norm.weight" not in plan:
        drop_unused_norm(tensors, "pool.reduction.")
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
