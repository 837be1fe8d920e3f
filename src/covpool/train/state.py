"""The state of training (how far it is, the weights, what the optimiser keeps) to a checkpoint and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from covpool.models.bundles.strict_json import plain_json
from covpool.train.checkpoint import Checkpoint, newest_checkpoint, set_aside_newer
from covpool.train.optimizer import load_optimizer_tensors, optimizer_tensors
from covpool.train.processes import Processes
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
