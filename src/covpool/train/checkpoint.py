"""Checkpoints of a training run: what they hold, how they are written and found."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from covpool.durable import replace_folder, write_file
from covpool.errors import BundleError, DamagedCheckpointError
from covpool.models.strict_json import parse, plain_json, reason
from covpool.processes import Processes
from covpool.train.optimizer import load_optimizer_tensors, optimizer_tensors
from covpool.train.step import Learner


@dataclass
class Progress:
    """How far training is.

    Attributes:
        cursor: global batches so far.
        loss: the sum over the steps of this epoch.
        top1: likewise.
        taken: the steps of this epoch that were not skipped.
        seconds: of training, so far in this epoch.
        history: a row for each epoch that is done and validated.
        best: the row of them whose model was the best.
        skips: steps that were skipped for a loss or gradient that was not finite.
    """

    cursor: int = 0
    loss: float = 0.0
    top1: float = 0.0
    taken: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    skips: int = 0


def to_checkpoint(learner: Learner, progress: Progress, images: Mapping[str, str]) -> Checkpoint:
    """All that training needs to go on.

    Args:
        learner: the weights, and what the optimiser keeps.
        progress: how far it is.
        images: the fingerprints of the images it learns from and is validated on.
    """
    tensors = {
        "model": learner.model.state_dict(),
        "optimizer": optimizer_tensors(learner.optimizer, learner.model),
    }
    if learner.ema is not None:
        tensors["ema"] = learner.ema.module.state_dict()
    state = dataclasses.asdict(progress) | {"scaler": learner.scaler.state_dict(), "images": dict(images)}
    del state["cursor"]
    return Checkpoint(progress.cursor, tensors, plain_json("state", state))


def from_checkpoint(learner: Learner, checkpoint: Checkpoint) -> Progress:
    """Put the weights into a learner that was made anew, and tell how far it is."""
    learner.model.load_state_dict(checkpoint.tensors["model"])
    load_optimizer_tensors(learner.optimizer, learner.model, checkpoint.tensors["optimizer"])
    if learner.ema is not None:
        learner.ema.module.load_state_dict(checkpoint.tensors["ema"])
    learner.scaler.load_state_dict(checkpoint.state["scaler"])
    known = {one.name for one in dataclasses.fields(Progress)}
    return Progress(
        cursor=checkpoint.step, **{name: value for name, value in checkpoint.state.items() if name in known}
    )


def shared_checkpoint(folder: Path, processes: Processes) -> Checkpoint | None:
    """The newest checkpoint that is whole, in every process; only the first needs to see the folder.

    Raises:
        DamagedCheckpointError: if there are some, and none is whole.
    """
    found: Checkpoint | None = None

    def read() -> tuple[int, dict[str, Any], list[str]] | None:
        nonlocal found
        found = newest_checkpoint(folder)
        if found is not None:
            set_aside_newer(folder, found.step)
        return None if found is None else (found.step, dict(found.state), list(found.tensors))

    head = processes.by_first(read)
    if head is None:
        return None
    step, state, parts = head

    def tensors(part: str) -> Mapping[str, Tensor]:
        assert found is not None  # in the first process, which alone is asked
        return found.tensors[part]

    received = {part: processes.tensors_by_first(functools.partial(tensors, part)) for part in parts}
    return Checkpoint(step, received, state)


LOGGER = logging.getLogger("covpool")
MANIFEST, STATE = "manifest.json", "state.json"
MAX_JSON_BYTES = 64 << 20
NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is saved.

    Attributes:
        step: global batches so far: the cursor.
        tensors: by the part they belong to, each part a file, then by name.
        state: everything else, as JSON has it.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into the folder of checkpoints, in place of one of the same step."""
    path = checkpoint_path(folder, checkpoint.step)
    with replace_folder(path) as new:
        hashes = {}
        for part, tensors in checkpoint.tensors.items():
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            hashes[f"{part}.safetensors"] = _write(new / f"{part}.safetensors", safetensors.torch.save(plain))
        state = {"step": checkpoint.step, **checkpoint.state}
        hashes[STATE] = _write(new / STATE, _canonical(state))
        _write(new / MANIFEST, _canonical(hashes))
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        DamagedCheckpointError: if a byte of it is not as it was written.
    """
    try:
        manifest = (path / MANIFEST).read_bytes()
        hashes = parse(manifest, MANIFEST, MAX_JSON_BYTES)
        if _canonical(hashes) != manifest or STATE not in hashes:
            raise DamagedCheckpointError(f"{path}: {MANIFEST} is not as it was written")
        data = {name: _read(path, name, expected) for name, expected in hashes.items()}
        state = parse(data.pop(STATE), STATE, MAX_JSON_BYTES)
        tensors = {name.removesuffix(".safetensors"): _tensors(part) for name, part in data.items()}
        return Checkpoint(step=state.pop("step"), tensors=tensors, state=state)
    except (OSError, BundleError, SafetensorError, KeyError) as error:
        raise DamagedCheckpointError(f"{path}: {reason(error)}") from error


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest that is whole; a warning tells of any that was not. ``None`` if there is none at all.

    Raises:
        DamagedCheckpointError: if there are some, and none is whole.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except DamagedCheckpointError as error:
            LOGGER.warning("%s: it is left out, and the checkpoint before it taken", error)
    if paths:
        raise DamagedCheckpointError(f"no checkpoint in {folder} is whole: remove them all to begin anew")
    return None


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename the checkpoints after a step, which were damaged: they would count as the last ones."""
    for path in list_checkpoints(folder):
        if _step(path) > step:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def list_checkpoints(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=_step)


def remove_old_checkpoints(folder: Path, keep: int, best_step: int | None) -> None:
    """Keep the last few, and that of the best epoch."""
    for path in list_checkpoints(folder)[:-keep]:
        if _step(path) != best_step:
            (path / MANIFEST).unlink(missing_ok=True)  # first, so that what a kill leaves of it is none
            shutil.rmtree(path)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()


def _write(path: Path, data: bytes) -> str:
    write_file(path, data)
    return hashlib.sha256(data).hexdigest()


def _read(path: Path, name: str, expected: object) -> bytes:
    if Path(name).name != name:  # a name such as ../x would be read elsewhere
        raise DamagedCheckpointError(f"{path}: {MANIFEST} names {name!r}")
    data = (path / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        raise DamagedCheckpointError(f"{path}: {name} is not as it was written")
    return data


def _tensors(data: bytes) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = safetensors.torch.load(data)
    return {name: torch.as_tensor(tensor) for name, tensor in loaded.items()}
