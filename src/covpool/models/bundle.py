"""Save and load bundles: a folder with weights and a card."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import timm.data
import torch
from torch import Tensor

from covpool.durable import read_folder, replace_folder, write_file
from covpool.errors import BundleError, UsageTypeError
from covpool.models.card import CARD, MAX_BYTES, WEIGHTS, Card, read_fields, write_card
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.models.strict_json import reason
from covpool.models.tensors import (
    check_tensors,
    computed_dtypes,
    explaining,
    fill,
    planned_tensors,
    tensors_of,
    versions,
)

__all__ = ["BundleError", "Card", "load_model", "read_card", "save_model"]

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def save_model(
    model: PooledClassifier,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model as a bundle: all that is needed to use it, to know what it is and how it was made.

    Every parameter and buffer keeps its bits and its dtype. Which parameters are frozen is not kept. A
    bundle that is already there is replaced as a whole, once the new one is on the disk: a kill or a full
    disk leaves the old one.

    Args:
        model: from :func:`covpool.create_model`.
        folder: a new or an empty folder, or a bundle, which is replaced.
        classes: the classes' names, in the order of the logits; ``None`` for the model's own ``classes``.
        metrics: what was measured: numbers, strings, lists and dicts. NaN and infinities become ``null``.
        recipe: how it was trained, likewise.

    Returns:
        The folder.

    Raises:
        BundleError: the folder holds something else, or the model is not what its ``config`` says.

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
            f"model must be one of covpool.create_model; got {type(model).__name__}: "
            "pass the model itself where it is wrapped (DDP: model.module, torch.compile: model._orig_mod)"
        )
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes or ()):
        raise UsageTypeError("classes must be a list of strings, one for each class")
    check_replaceable(folder)
    with _naming(folder):
        tensors = tensors_of(model)
        weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
        classes = model.classes if classes is None else classes
        card = _card_of(model, classes, metrics or {}, recipe or {}, weights)
        text = write_card(card)
        _check_described(tensors, card)
    with replace_folder(folder) as new:
        write_file(new / WEIGHTS, weights)
        write_file(new / CARD, text)
    return Path(folder)


def check_replaceable(folder: str | Path) -> None:
    """Raise where :func:`save_model` would not write: before hours of work.

    Raises:
        BundleError: likewise.
    """
    with _naming(folder):
        read_folder(folder, _check_replaceable)


def check_savable(model: PooledClassifier) -> None:
    """Raise where :func:`save_model` would refuse what the model is made of: before hours of training.

    Raises:
        BundleError: likewise.
    """
    write_card(_card_of(model, model.classes, {}, {}, b""))


def _card_of(
    model: PooledClassifier,
    classes: Sequence[str] | None,
    metrics: Mapping[str, Any],
    recipe: Mapping[str, Any],
    weights: bytes,
) -> Card:
    return Card(
        config=model.config,
        classes=None if classes is None else tuple(classes),
        preprocessing=timm.data.resolve_model_data_config(model),
        metrics=dict(metrics),
        recipe=dict(recipe),
        versions=versions(),
        sha256=hashlib.sha256(weights).hexdigest(),
        bytes=len(weights),
        buffer_dtypes=computed_dtypes(model),
    )


def load_model(folder: str | Path, *, device: str | torch.device = "cpu") -> PooledClassifier:
    """Load a bundle: the model in evaluation mode, with its weights, classes' names and preprocessing.

    The weights are read once, into memory, and hashed and used there, so that nobody can exchange them
    between the check and the use. For a moment that takes twice the memory of the model. Random numbers
    drawn later are those that would have been drawn without loading.

    Args:
        folder: where :func:`save_model` put it, or where it was downloaded to.
        device: where the model is to be.

    Raises:
        BundleError: the bundle is refused, or there is none; the message says why.
    """
    with _naming(folder), torch.random.fork_rng(devices=[]):
        card, tensors = read_folder(folder, _read)
        with explaining(card), torch.device("cpu"):
            model = build_model(card.config)
        fill(model, tensors, card)
    model.classes = card.classes
    # What it was trained with, even if another timm has other defaults for this backbone.
    model.pretrained_cfg.update(card.preprocessing)
    return model.eval().to(device)


def read_card(folder: str | Path) -> Card:
    """What a bundle says of itself, once both of its files have proved whole; no network is built.

    Raises:
        BundleError: the bundle is refused, or there is none; the message says why.
    """

    def read(path: Path) -> Card:
        card = _card(path)
        with _open(path, WEIGHTS) as file:
            _check_size(file, card)
            _check_sha256(hashlib.file_digest(file, "sha256").hexdigest(), card)
        return card

    with _naming(folder):
        return read_folder(folder, read)


@contextlib.contextmanager
def _naming(folder: str | Path) -> Iterator[None]:
    """Put the name of the folder before the reason."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"bundle {str(folder)!r}: {error}") from error.__cause__


def _read(folder: Path) -> tuple[Card, dict[str, Tensor]]:
    card = _card(folder)
    with _open(folder, WEIGHTS) as file:
        _check_size(file, card)
        plan = planned_tensors(card)
        # A huge file of zeros takes no room in an archive or on a disk, but would in memory.
        if card.bytes > MAX_HEADER_BYTES + sum(8 * tensor.numel() for tensor in plan.values()):
            raise BundleError(f"{WEIGHTS} is far larger than the network its card describes")
        data = file.read(card.bytes)
    _check_sha256(hashlib.sha256(data).hexdigest(), card)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:
        raise BundleError(f"{WEIGHTS} is not a safetensors file: {reason(error)}") from error
    check_tensors(tensors, plan)
    return card, tensors


def _card(folder: Path) -> Card:
    with _open(folder, CARD) as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return read_fields(data)
    except RecursionError as error:
        raise BundleError(f"{CARD} has lists within lists without end") from error


@contextlib.contextmanager
def _open(folder: Path, name: str) -> Iterator[BufferedReader]:
    """A file of a bundle. Links are followed, for the caches of model hubs are made of them.

    A link leads to nothing that its maker did not have: what is read must have the hash of the card, and no
    message quotes it. But it must not lead to a device or a pipe, which never end.
    """
    if not folder.is_dir():
        what = "there is no such folder, but a file" if folder.exists() else "there is no such folder"
        raise BundleError(f"{what}: {_meant(folder.parent)}")
    try:
        descriptor = os.open(
            folder / name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    except FileNotFoundError as error:
        raise BundleError(f"there is no {name} in it: {_meant(folder)}") from error
    except OSError as error:
        raise BundleError(f"its {name} cannot be opened: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BundleError(f"its {name} is not a file")
        yield file


def _meant(run: Path) -> str:
    """What to give in place of the folder of a run or of a comparison, whose runs are in folders of it."""
    inside = [run / "bundle", *sorted(run.glob("*/bundle"))]
    found = [str(path) for path in inside if (path / CARD).exists()]
    return f"did you mean {' or '.join(found[:2])}?" if found else "give the folder bundle of a run"


def _check_size(file: BufferedReader, card: Card) -> None:
    size = os.fstat(file.fileno()).st_size
    if size < card.bytes:
        raise BundleError(f"{WEIGHTS} is cut short, {size} bytes of {card.bytes}: copy it anew")
    if size > card.bytes:
        raise BundleError(
            f"{WEIGHTS} has {size} bytes, {card.bytes} by its card: the two files do not belong together"
        )


def _check_sha256(found: str, card: Card) -> None:
    if found != card.sha256:
        raise BundleError(
            f"{WEIGHTS} is damaged or not the one of this card (its hash differs): copy both anew"
        )


def _check_described(tensors: Mapping[str, Tensor], card: Card) -> None:
    try:
        check_tensors(tensors, planned_tensors(card))
    except BundleError as error:
        raise BundleError(
            f"the model was changed after it was made, and could not be loaded: {error}"
        ) from error


def _check_replaceable(folder: Path) -> None:
    """Raise unless there is nothing, or a bundle and nothing else: what is replaced is gone."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise BundleError("there is a file of this name")
    found = {path.name for path in folder.iterdir()}
    if others := sorted(found - {CARD, WEIGHTS}):
        raise BundleError(
            f"the folder holds other things, such as {others[0]!r}: save to a new or an empty one"
        )
    if found and CARD not in found:
        raise BundleError(
            f"the folder holds {WEIGHTS} of something that is no bundle: save to a new or an empty one"
        )
