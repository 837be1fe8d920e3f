"""Write, find and read the checkpoints of a training run."""

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
from safetensors import SafetensorError
from torch import Tensor

from covpool.durable import replace_folder, write_file
from covpool.errors import BundleError, DamagedCheckpointError
from covpool.models.card import parse, plain_json, reason
from covpool.processes import Processes
from covpool.train.network import load_optimizer_tensors, optimizer_tensors
from covpool.train.step import Learner

LOGGER = logging.getLogger("covpool")
MANIFEST, STATE, SUFFIX = "manifest.json", "state.json", ".safetensors"
MAX_JSON_BYTES = 64 << 20
NAME = re.compile(r"step-(\d{8,})")


@dataclass
class Progress:
    """The position of a training run.

    Attributes:
        cursor: global batches so far.
        loss: the sum over the steps of this epoch.
        top1: the sum of the top-1 accuracies over the steps of this epoch.
        taken: the steps of this epoch that were not skipped.
        seconds: training time so far in this epoch.
        history: a row for each epoch that is finished and validated.
        skips: steps that were skipped for a loss or gradient that was not finite.
    """

    cursor: int = 0
    loss: float = 0.0
    top1: float = 0.0
    taken: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    skips: int = 0


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        step: global batches so far: the cursor.
        tensors: by part, each part a file, then by name.
        state: the rest, as JSON.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]

    @property
    def progress(self) -> Progress:
        """The position of the run. Older checkpoints have more keys, which are not needed."""
        names = {one.name for one in dataclasses.fields(Progress)} & self.state.keys()
        return Progress(cursor=self.step, **{name: self.state[name] for name in names})


def to_checkpoint(learner: Learner, progress: Progress, origin: Mapping[str, Any]) -> Checkpoint:
    """Return everything that a run needs to resume.

    Args:
        learner: the weights and the optimizer.
        progress: the position of the run.
        origin: the images and the recipe, to compare on resume.
    """
    tensors = {
        "model": learner.model.state_dict(),
        "optimizer": optimizer_tensors(learner.optimizer, learner.model),
    }
    if learner.ema is not None:
        tensors["ema"] = learner.ema.module.state_dict()
    state = dataclasses.asdict(progress) | {"scaler": learner.scaler.state_dict(), **origin}
    del state["cursor"]
    return Checkpoint(progress.cursor, tensors, plain_json("state", state))


def load_learner(learner: Learner, checkpoint: Checkpoint) -> None:
    """Load weights and optimizer state into a new learner."""
    learner.model.load_state_dict(checkpoint.tensors["model"])
    load_optimizer_tensors(learner.optimizer, learner.model, checkpoint.tensors["optimizer"])
    if learner.ema is not None:
        learner.ema.module.load_state_dict(checkpoint.tensors["ema"])
    learner.scaler.load_state_dict(checkpoint.state["scaler"])


def shared_checkpoint(folder: Path, processes: Processes) -> Checkpoint | None:
    """Return the newest valid checkpoint in every process; only the first reads the folder.

    Raises:
        DamagedCheckpointError: if there are checkpoints, and none is valid.
    """
    found: Checkpoint | None = None

    def read() -> tuple[int, Mapping[str, Any], list[str]] | None:
        nonlocal found
        found = newest_checkpoint(folder)
        if found is None:
            return None
        set_aside_newer(folder, found.step)
        return found.step, found.state, list(found.tensors)

    def tensors(part: str) -> Mapping[str, Tensor]:
        assert found is not None  # only the first process calls this
        return found.tensors[part]

    head = processes.by_first(read)
    if head is None:
        return None
    step, state, parts = head
    received = {part: processes.tensors_by_first(functools.partial(tensors, part)) for part in parts}
    return Checkpoint(step, received, state)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint; one of the same step is replaced."""
    path = checkpoint_path(folder, checkpoint.step)
    with replace_folder(path) as new:
        hashes = {}
        for part, tensors in checkpoint.tensors.items():
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            hashes[part + SUFFIX] = _write(new / (part + SUFFIX), safetensors.torch.save(plain))
        hashes[STATE] = _write(new / STATE, _canonical({"step": checkpoint.step, **checkpoint.state}))
        _write(new / MANIFEST, _canonical(hashes))
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        DamagedCheckpointError: if a byte of it has changed.
    """
    try:
        manifest = (path / MANIFEST).read_bytes()
        hashes = parse(manifest, MANIFEST, MAX_JSON_BYTES)
        if _canonical(hashes) != manifest or STATE not in hashes:
            raise DamagedCheckpointError(f"{path}: {MANIFEST} is damaged")
        data = {name: _read(path, name, expected) for name, expected in hashes.items()}
        state = parse(data.pop(STATE), STATE, MAX_JSON_BYTES)
        tensors = {name.removesuffix(SUFFIX): safetensors.torch.load(part) for name, part in data.items()}
        return Checkpoint(step=state.pop("step"), tensors=tensors, state=state)
    except (OSError, BundleError, SafetensorError, KeyError) as error:
        raise DamagedCheckpointError(f"{path}: {reason(error)}") from error


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint, with a warning for each damaged one; ``None`` if there is none.

    Raises:
        DamagedCheckpointError: if there are checkpoints, and none is valid.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except DamagedCheckpointError as error:
            LOGGER.warning("%s: covpool tries the checkpoint before it", error)
    if paths:
        raise DamagedCheckpointError(f"no checkpoint in {folder} is valid: remove them all to start again")
    return None


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename the damaged checkpoints after a step, which would count as the last ones."""
    for path in list_checkpoints(folder):
        if _step(path) > step:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=_step)


def remove_old_checkpoints(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the last few and that of the best epoch."""
    for path in list_checkpoints(folder)[:-keep]:
        if _step(path) != best_step:
            (path / MANIFEST).unlink(missing_ok=True)  # first: a kill must not leave a valid part
            shutil.rmtree(path)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()


def _write(path: Path, data: bytes) -> str:
    write_file(path, data)
    return hashlib.sha256(data).hexdigest()


def _read(path: Path, name: str, expected: object) -> bytes:
    if Path(name).name != name:  # ../x would be read elsewhere
        raise DamagedCheckpointError(f"{path}: {MANIFEST} names {name!r}")
    data = (path / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        raise DamagedCheckpointError(f"{path}: {name} is damaged")
    return data
