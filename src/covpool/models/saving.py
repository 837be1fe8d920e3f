"""Save bundles. A kill while saving leaves the old bundle or the new one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import timm.data
import torch
from torch import Tensor

from covpool.errors import BundleError, UsageError, UsageTypeError
from covpool.hub import HUB
from covpool.models.card import CARD, INDEX, WEIGHTS, Card, backbone_digest, versions, write_card
from covpool.models.divided import (
    CLASSIFIER,
    PART_FILE,
    Index,
    index_bytes,
    replaced_by_all,
    split_rows,
    write_share,
)
from covpool.models.model import PooledClassifier
from covpool.models.tensors import (
    FLOATS,
    check_finite,
    check_tensors,
    computed_buffers,
    naming,
    planned_tensors,
)
from covpool.nn.divided import DividedLinear
from covpool.processes import Processes
from covpool.storage.files import digest, write_file
from covpool.storage.folders import read_folder, replace_folder, resolved


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
        >>> from covpool.models import create_model, load_model, read_card
        >>> model = create_model("test_resnet", dim=8, num_classes=2)
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = save_model(model, f"{parent}/birds", classes=["jay", "wren"], metrics={"top1": 0.9})
        ...     load_model(folder).classes, read_card(folder).metrics
        (('jay', 'wren'), {'top1': 0.9})
    """
    _save(model, resolved(folder), str(folder), classes, metrics or {}, recipe or {})
    return Path(folder)


def _save(
    model: PooledClassifier,
    folder: Path,
    name: str,
    classes: Sequence[str] | None,
    metrics: Mapping[str, Any],
    recipe: Mapping[str, Any],
) -> None:
    """Save a bundle; a link in the place of ``folder`` is replaced. ``name`` is for messages."""
    if not isinstance(model, PooledClassifier):
        raise UsageTypeError(
            f"model must come from covpool.create_model; got {type(model).__name__}: "
            "pass the wrapped model itself (DDP: model.module, torch.compile: model._orig_mod)"
        )
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes or ()):
        raise UsageTypeError("classes must be a list of strings, one for each class")
    check_replaceable(name)
    with naming(name):
        tensors = tensors_of(model)
        weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
        classes = model.classes if classes is None else classes
        for k, label in enumerate(classes or ()):
            if re.search("[\ud800-\udfff]", label):  # Python's mark for bytes that are not UTF-8
                raise UsageError(f"classes[{k}] is {label!r}, which is not valid UTF-8")
        card = card_of(model, weights, classes=classes, metrics=metrics, recipe=recipe)
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


def check_replaceable(folder: str | Path) -> None:
    """Raise BundleError where :func:`save_model` would not write: before hours of work.

    The folder must not exist, be empty, or be a bundle without other files: its content is replaced.
    """

    def check(path: Path) -> None:
        if str(folder).startswith(HUB):
            raise BundleError("it is on the Hub: save to a folder, then use covpool push FOLDER user/name")
        if path.exists() and not path.is_dir():
            raise BundleError("a file of this name exists")
        names = {file.name for file in path.iterdir()} if path.exists() else set()
        bundle_files = {name for name in names if name in (CARD, WEIGHTS, INDEX) or PART_FILE.fullmatch(name)}
        if others := sorted(names - bundle_files if CARD in names else names):
            raise BundleError(
                f"the folder holds other files, such as {others[0]!r}: save to a new or empty folder"
            )

    with naming(folder):
        read_folder(folder, check)


def check_savable(model: PooledClassifier) -> None:
    """Raise BundleError where :func:`save_model` would refuse the model: before hours of training."""
    write_card(card_of(model, b"", classes=model.classes, metrics={}, recipe={}))


def card_of(model: PooledClassifier, weights: bytes, **given: Any) -> Card:
    """Return the card of a model and the content of its weights file."""
    return Card(
        config=model.config,
        preprocessing=timm.data.resolve_model_data_config(model),
        versions=versions(),
        initial_weights=model.initial_weights,
        sha256=digest(weights),
        bytes=len(weights),
        buffer_dtypes=computed_dtypes(model),
        backbone_sha256=backbone_digest(model),
        **given,
    )


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


def computed_dtypes(model: PooledClassifier) -> dict[str, str]:
    """Return the dtypes of computed buffers where not float32: casting the model casts them too."""
    names = {dtype: name for name, dtype in FLOATS.items() if dtype != torch.float32}
    return {name: names[b.dtype] for name, b in computed_buffers(model) if b.dtype in names}


def save_together(
    model: PooledClassifier,
    folder: Path,
    processes: Processes,
    *,
    metrics: Mapping[str, Any],
    recipe: Mapping[str, Any],
) -> None:
    """Save a bundle; all processes call it, and those of a divided classifier each write their rows."""
    classifier = model.head.classifier
    if not isinstance(classifier, DividedLinear):
        processes.by_first(lambda: _save(model, folder, str(folder), None, metrics, recipe))
        return
    processes.by_first(lambda: check_replaceable(folder))
    classifier_rows, shared = split_rows(tensors_of(model), classifier)
    with replaced_by_all(folder, processes) as new:

        def write() -> Index:
            check_finite(classifier_rows | shared)
            parts = [(processes.rank + 2, classifier_rows)] + ([(1, shared)] if processes.is_first else [])
            count = processes.world_size + 1
            names = {f"model-{place:05d}-of-{count:05d}.safetensors": part for place, part in parts}
            return {name: write_share(new / name, part) for name, part in names.items()}

        files = processes.gather(processes.together(write))

        def finish() -> None:
            index = index_bytes({name: file for part in files for name, file in part.items()})
            card = card_of(model, index, classes=model.classes, metrics=metrics, recipe=recipe)
            card = replace(card, file=INDEX)
            whole = {
                name: torch.empty(
                    classifier.num_classes, *tensor.shape[1:], dtype=tensor.dtype, device="meta"
                )
                for name, tensor in classifier.state_dict(prefix=CLASSIFIER).items()
            }
            check_tensors({**shared, **whole}, planned_tensors(card))
            write_file(new / INDEX, index)
            write_file(new / CARD, write_card(card))

        processes.by_first(finish)
