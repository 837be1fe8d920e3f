"""Keep the sums of a fit, and change its model with them: add images and classes, remove images, merge.

A folder of :func:`covpool.fit` with ``keep_sums`` has ``bundle`` and ``sums``. The model of changed sums is
that of a fit to the same images with the same basis.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from covpool.arguments import Device
from covpool.closed_form.heads import ModelVectors, basis_of, set_classifier
from covpool.closed_form.options import MANIFEST, SUMS
from covpool.closed_form.solve import solve
from covpool.closed_form.sums import Sums
from covpool.closed_form.vectors import Vectors, compute_vectors
from covpool.data.image_set import ImageSet
from covpool.data.look import content_number
from covpool.data.sources import open_images, open_unlabeled
from covpool.errors import StorageError, UsageError
from covpool.inference import Running
from covpool.models.bundle import load_model, read_card
from covpool.models.card import backbone_digest
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model
from covpool.storage.files import MAX_TEXT_BYTES, Digest, read_file, write_file
from covpool.storage.folders import (
    clean_up,
    held,
    new_folder,
    read_folder,
    remove,
    replace_folder,
    resolved,
    scratch_folder,
)
from covpool.storage.manifest import Manifest, part_of, read_part
from covpool.terminal import counted

BUNDLE = "bundle"
# What covpool fit writes about single images: names, pictures, predictions, vectors, and networks that were
# trained on them.
TRACES = (
    "report.html",
    "labels*.csv",
    "problems.csv",
    "per_class.csv",
    "confusion.png",
    "worst.png",
    "predictions",
    "probe",
    "features",
    "start",
    "finetune",
    "work",
)
TENSORS = "sums.safetensors"
Progress = Callable[[str, int, int], None]


def identity_of(model: PooledClassifier) -> str:
    """Return a digest of everything that the vectors of a model depend on."""
    config = model.config.to_dict()
    for name in ("num_classes", "drop_rate"):
        config.pop(name)
    facts = [config, backbone_digest(model), model.pretrained_cfg["input_size"], model.config.preprocessing]
    identity = Digest(json.dumps(facts, sort_keys=True).encode())
    if getattr(model.pool, "reduction", None) is not None:
        identity.update(basis_of(model).detach().cpu().numpy().tobytes())
    return identity.hexdigest()


def basis_of_fit(folder: Path, dim: int, backbone: str | None = None) -> Tensor:
    """Return the basis of an earlier fit, ``(dim, C)``.

    Args:
        folder: folder of the fit.
        dim: number of channels.
        backbone: the backbone that the fit must have, if given.

    Raises:
        UsageError: if its model has no basis, a smaller one, or another backbone.
    """
    model = load_model(_fit_folder(folder) / BUNDLE)
    if (
        getattr(model.pool, "reduction", None) is None
        or model.config.pool_options.get("reduction") != "linear"
    ):
        raise UsageError(f"{folder} has no PCA basis: its head is {model.config.pool}. Leave out --basis")
    if backbone not in (None, model.config.backbone):
        raise UsageError(
            f"the basis of {folder} is of {model.config.backbone}, not of {backbone}: "
            f"use --model {model.config.backbone}"
        )
    basis = basis_of(model).detach()
    if len(basis) < dim:
        raise UsageError(f"the basis of {folder} has {len(basis)} channels: use --dim {len(basis)} or less")
    return basis[:dim]


def save_sums(folder: Path, sums: Sums, about: Mapping[str, Any]) -> int:
    """Write the folder of some sums, with the options that a change needs, and return its size in bytes."""
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in sums.to_tensors().items()})
    about = {**about, "identity": sums.identity, "classes": list(sums.classes)}
    with replace_folder(folder) as new:
        write_file(new / TENSORS, data)
        write_file(new / MANIFEST, Manifest({TENSORS: part_of(data)}, about).written())
    return len(data)


def load_sums(folder: Path) -> tuple[Sums, dict[str, Any]]:
    """Read the folder of :func:`save_sums`: the sums, and facts about them.

    Raises:
        UsageError: if there are none, or they are damaged.
    """

    def read(path: Path) -> tuple[Sums, dict[str, Any]]:
        manifest = Manifest.read(read_file(path / MANIFEST, MAX_TEXT_BYTES))
        about = _checked(manifest.about)
        tensors = safetensors.torch.load(read_part(path, TENSORS, manifest.parts[TENSORS]))
        return Sums.from_tensors(about["identity"], about["classes"], tensors), about

    try:
        return read_folder(folder, read)
    except FileNotFoundError as error:
        raise UsageError(f"{folder} does not exist: run covpool fit with --keep-sums") from error
    except (StorageError, KeyError, safetensors.SafetensorError) as error:
        raise UsageError(f"the sums in {folder} are damaged: {error}. Run covpool fit again") from error


def _checked(about: Any) -> dict[str, Any]:
    """Return facts about sums, which may come from others, or raise unless they are those of a fit."""
    kinds = {"identity": str, "classes": list, "head": str, "balance": bool, "compile": bool}
    fits = isinstance(about, dict) and all(type(about.get(name)) is kind for name, kind in kinds.items())
    if fits:
        classes, batch_size = about["classes"], about.get("batch_size")
        fits = all(isinstance(name, str) for name in classes) and len(set(classes)) == len(classes)
        fits = fits and type(batch_size) is int and 0 < batch_size < 1 << 16
    if not fits:
        raise StorageError("its facts are not those of a fit")
    return dict(about)


@dataclass(frozen=True)
class Changed:
    """The result of :func:`update`, :func:`forget` or :func:`merge`.

    Attributes:
        folder: folder with the new ``bundle`` and ``sums``.
        images: number of training images now.
        classes: number of classes now.
        new_images: images added; negative if some were removed.
        new_classes: classes added; negative if some were removed.
        known_images: images that were already counted.
        unreadable: names of images that cannot be read, and were not added.
        held_out: accuracy on held-out training images.
        held_out_before: the same before the change; ``None`` for a merge.
    """

    folder: Path
    images: int
    classes: int
    new_images: int
    new_classes: int
    known_images: int
    unreadable: tuple[str, ...]
    held_out: float
    held_out_before: float | None

    @property
    def model(self) -> PooledClassifier:
        """The model, loaded from the bundle."""
        return load_model(self.folder / BUNDLE)


def update(
    model: str | Path,
    data: str | Path,
    *,
    workers: int = 2,
    device: Device = "auto",
    progress: Progress = lambda what, done, total: None,
) -> Changed:
    """Add labeled images to a fitted model, with or without new classes. The backbone runs on them alone.

    Args:
        model: folder of a fit with ``keep_sums``; its bundle and sums are replaced.
        data: images by class, as for :func:`covpool.fit`. If it has splits, only train images are added.
        workers: processes that read images.
        device: ``"auto"`` uses a GPU if there is one.
        progress: called with the name of the counted items, the number done and the total.
    """
    images = open_images(data, "train")
    with _changing(model, progress) as (root, sums, about):
        classes = (*sums.classes, *(name for name in images.classes if name not in sums.classes))
        changed, added, seen, unreadable = sums.with_classes(classes), 0, 0, []
        place = torch.tensor([classes.index(name) for name in images.classes])
        running = Running(about["batch_size"], workers, device, compile=about["compile"])
        for part in _vectors(root, images, running, progress):
            unreadable += [name for name, _ in part.errors]
            rows = part.rows(np.asarray(images.labels, dtype=np.int64))
            seen += len(rows)
            added += changed.add(dataclasses.replace(rows, labels=place[rows.labels]))
        result = _save(root, root, changed, about, sums, progress)
        return dataclasses.replace(
            result, new_images=added, known_images=seen - added, unreadable=tuple(unreadable)
        )


def forget(
    model: str | Path,
    data: str | Path,
    *,
    workers: int = 2,
    device: Device = "auto",
    progress: Progress = lambda what, done, total: None,
) -> Changed:
    """Remove images from a fitted model. The result equals a fit without them, with the same PCA.

    If the vectors of all images take at most 1 GiB, they are saved with the sums. Then the backbone does not
    run, and the bytes of an image identify it. The report and other files that may show or name the images
    are removed too.

    Args:
        model: folder of a fit with ``keep_sums``; its bundle and sums are replaced.
        data: the images to remove: a photograph, a folder, or a CSV of paths. If the vectors were
            not saved, the images must be labeled, as for :func:`covpool.fit`.
        workers: processes that read images.
        device: ``"auto"`` uses a GPU if there is one.
        progress: called with the name of the counted items, the number done and the total.

    Raises:
        UsageError: if an image was not among the training images, or cannot be read.
    """
    photos = open_unlabeled(data)
    with _changing(model, progress) as (root, sums, about):
        changed, removed = sums.with_classes(sums.classes), 0
        if sums.is_exact:
            numbers = _numbers_of(photos, sums, root, progress)
            changed.remove(changed.rows_of(numbers))
            removed = len(numbers.unique())
        else:
            images = open_images(data, "train")
            if unknown := sorted(set(images.classes) - set(sums.classes)):
                raise UsageError(f"{data} has the class {unknown[0]!r}, which the model does not have")
            place = torch.tensor([sums.classes.index(name) for name in images.classes])
            running = Running(about["batch_size"], workers, device, compile=about["compile"])
            for part in _vectors(root, images, running, progress):
                if part.errors:
                    name, error = part.errors[0]
                    raise UsageError(f"{name} cannot be read, so nothing is removed: {error}")
                rows = part.rows(np.asarray(images.labels, dtype=np.int64))
                changed.remove(dataclasses.replace(rows, labels=place[rows.labels]))
                removed += len(rows)
        counts = changed.counts().tolist()
        kept = [name for name, count in zip(changed.classes, counts, strict=True) if count]
        result = _save(root, root, changed.with_classes(kept), about, sums, progress, TRACES)
        return dataclasses.replace(result, new_images=-removed)


def _numbers_of(photos: ImageSet, sums: Sums, root: Path, progress: Progress) -> Tensor:
    """Return the numbers of images to remove, which are in the sums of a fit."""
    numbers, missing = [], []
    for i in range(len(photos)):
        progress("images", i, len(photos))
        try:
            numbers.append(content_number(photos.read(i)))
        except FileNotFoundError as error:
            missing.append(error)
    if missing:
        what = f"{missing[0].strerror} ({len(missing):,} of {counted(len(photos), 'image')} to remove)"
        raise FileNotFoundError(missing[0].errno, what, missing[0].filename)
    unknown = np.flatnonzero(~np.isin(numbers, sums.rows.images.numpy()))
    if len(unknown):
        images, first = counted(len(photos), "image"), photos.name(int(unknown[0]))
        raise UsageError(
            f"{len(unknown):,} of {images} to remove, first {first}, are not training images of {root}: an "
            "image is recognized by its bytes, so pass the files that were fitted, unchanged"
        )
    return torch.tensor(numbers)


def merge(
    first: str | Path,
    second: str | Path,
    out: str | Path,
    *,
    progress: Progress = lambda what, done, total: None,
) -> Changed:
    """Merge two fitted models into one of all their images, without the images themselves.

    Args:
        first: folder of a fit with ``keep_sums``.
        second: folder of another one with the same backbone and basis (``basis``).
        out: a new folder.
        progress: called with the name of the counted items, the number done and the total.
    """
    root = resolved(out)
    with (
        new_folder(root) as new,
        _changing(first, progress) as (source, sums, about),
        _changing(second, progress) as (_, more, others),
    ):
        if about["head"] != others["head"]:
            raise UsageError(
                f"the sums of {first} are of the head {about['head']}, and those of {second} of "
                f"{others['head']}: fit both with --heads {about['head']}"
            )
        merged = sums + more
        result = _save(source, new, merged, about, None, progress)
    known = len(sums) + len(more) - len(merged)
    return dataclasses.replace(result, folder=Path(out), new_images=len(merged), known_images=known)


@contextmanager
def _changing(folder: str | Path, progress: Progress) -> Iterator[tuple[Path, Sums, dict[str, Any]]]:
    """Hold the folder of a fit, and yield it with its sums and facts about them.

    Raises:
        UsageError: if the sums are not of the vectors of its model, which may have been fine-tuned since.
    """
    root = _fit_folder(folder)
    progress(f"saved sums, of {root}", 0, 1)
    with held(root):
        clean_up(root / SUMS)  # a killed change may have left the old vectors
        sums, about = load_sums(root / SUMS)
        if identity_of(load_model(root / BUNDLE)) != sums.identity:
            raise UsageError(
                f"{root / BUNDLE} is not the model whose sums are kept: it was fine-tuned or replaced. "
                "Run covpool fit with --keep-sums and another --out"
            )
        yield root, sums, about


def _vectors(root: Path, images: ImageSet, running: Running, progress: Progress) -> Iterator[Vectors]:
    """Yield the vectors of images by the model of a fit, in batches of the size of the fit."""
    with scratch_folder() as scratch:
        for file in compute_vectors(
            root / BUNDLE, images, scratch / "rows", ModelVectors(), running, partial(progress, "images")
        ):
            yield file.read()


def _fit_folder(folder: str | Path) -> Path:
    """Return the folder of a fit, from it or from its bundle."""
    path = Path(folder)
    path = path.parent if path.name == BUNDLE and (path.parent / SUMS).exists() else path
    if not (path / BUNDLE).exists():
        raise UsageError(f"{path} is not a folder of covpool fit: it has no {BUNDLE} in it")
    return path


def _save(
    source: Path,
    root: Path,
    sums: Sums,
    about: dict[str, Any],
    before: Sums | None,
    progress: Progress,
    traces: Sequence[str] = (),
) -> Changed:
    """Solve changed sums, replace bundle and sums of a folder, and remove what is named in ``traces``.

    The sums come last: after a kill before them, the same command gives the same result.
    """
    model, card = load_model(source / BUNDLE), read_card(source / BUNDLE)
    strengths = partial(progress, "regularization strengths")
    solution = solve(sums, balance=about["balance"], progress=strengths)
    set_classifier(model, solution, sums.classes)
    metrics = {"held_out": solution.accuracy}
    for path in [path for name in traces for path in root.glob(name)]:
        remove(path)
    save_model(model, root / BUNDLE, metrics=metrics, recipe=card.recipe)
    save_sums(root / SUMS, sums, {**about, "is_changed": True})
    return Changed(
        root,
        len(sums),
        len(sums.classes),
        0,
        len(sums.classes) - (0 if before is None else len(before.classes)),
        0,
        (),
        solution.accuracy,
        None if before is None else card.metrics.get("held_out"),
    )
