"""Write, find and read the checkpoints of a training run."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from covpool.errors import BundleError, DamagedCheckpointError
from covpool.models.card import parse, plain_json, reason
from covpool.models.divided import CLASSIFIER, joined_rows, replaced_by_all, write_share
from covpool.models.model import PooledClassifier
from covpool.processes import ALONE, Processes
from covpool.storage.files import check_regular, read_file, write_file
from covpool.storage.folders import make_folder, remove_folder, rename_folder
from covpool.storage.manifest import Manifest, Part, check_part, part_of, read_part
from covpool.training.network import SEPARATOR, load_optimizer_tensors, optimizer_tensors
from covpool.training.step import Learner

LOGGER = logging.getLogger("covpool")
MANIFEST, STATE, SUFFIX = "manifest.json", "state.json", ".safetensors"
MAX_JSON_BYTES = 64 << 20
NAME = re.compile(r"step-(\d{8,})")
ROW_FILE = re.compile(r"rows-\d{9}-\d{9}\.safetensors")


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
        rows: this process's rows of a divided classifier, by names such as ``ema/head.classifier.bias``.
        row_files: the files that have such rows, by name.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    row_files: Mapping[str, Part] = field(default_factory=dict)

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a part, with this process's rows."""
        start = f"{name}/"
        part_rows = {
            key.removeprefix(start): rows for key, rows in self.rows.items() if key.startswith(start)
        }
        return {**self.tensors[name], **part_rows}

    @property
    def progress(self) -> Progress:
        """The position of the run. Older checkpoints have more keys, which are not needed."""
        names = {field.name for field in dataclasses.fields(Progress)} & self.state.keys()
        return Progress(cursor=self.step, **{name: self.state[name] for name in names})


def to_checkpoint(learner: Learner, progress: Progress, origin: Mapping[str, Any]) -> Checkpoint:
    """Return everything that a run needs to resume."""
    tensors = {
        "model": learner.model.state_dict(),
        "optimizer": optimizer_tensors(learner.optimizer, learner.model),
    }
    if learner.ema is not None:
        tensors["ema"] = learner.ema.module.state_dict()
    rows = _split_rows(tensors, learner.model) if learner.classifier is not None else {}
    state = dataclasses.asdict(progress) | {"scaler": learner.scaler.state_dict(), **origin}
    del state["cursor"]
    return Checkpoint(progress.cursor, tensors, plain_json("state", state), rows)


def _split_rows(tensors: dict[str, dict[str, Tensor]], model: PooledClassifier) -> dict[str, Tensor]:
    """Move the rows of a divided classifier, and their optimizer state, out of the parts of a checkpoint."""
    rows = {}
    shapes = {f"{CLASSIFIER}{name}": p.shape for name, p in model.head.classifier.named_parameters()}
    for part, named in tensors.items():
        for name in list(named):
            # The number of steps in an optimizer's state is the same in every process.
            if named[name].shape == shapes.get(name.partition(SEPARATOR)[0]):
                rows[f"{part}/{name}"] = named.pop(name)
    return rows


def load_learner(learner: Learner, checkpoint: Checkpoint) -> None:
    """Load weights and optimizer state into a new learner."""
    learner.model.load_state_dict(checkpoint.part("model"))
    load_optimizer_tensors(learner.optimizer, learner.model, checkpoint.part("optimizer"))
    if learner.ema is not None:
        learner.ema.module.load_state_dict(checkpoint.part("ema"))
    learner.scaler.load_state_dict(checkpoint.state["scaler"])


def shared_checkpoint(
    folder: Path, processes: Processes, rows: range | None = None, step: int | None = None
) -> Checkpoint | None:
    """Return the newest valid checkpoint in every process.

    Only the first process reads the folder, except for the rows of a divided classifier. Each process checks
    the hashes of a share of these files, and reads its rows.

    Args:
        folder: the folder of checkpoints.
        processes: the processes, whose number may differ from that of the checkpoint.
        rows: this process's rows of a divided classifier.
        step: the checkpoint of this step only; checkpoints after it stay.

    Raises:
        DamagedCheckpointError: if there are checkpoints, and none is valid.
    """
    damaged: set[int] = set()
    while True:
        checkpoint = _from_first(folder, processes, damaged, step)
        if checkpoint is None:
            return None
        path = checkpoint_path(folder, checkpoint.step)
        wrong = processes.gather(_damage(path, checkpoint.row_files, processes))
        if not any(wrong):
            if step is None:
                processes.by_first(functools.partial(set_aside_newer, folder, checkpoint.step))
            if rows is None:
                return checkpoint
            own_rows = processes.together(functools.partial(_read_rows, path, checkpoint.row_files, rows))
            return replace(checkpoint, rows=own_rows)
        LOGGER.warning("%s: covpool tries the checkpoint before it", next(filter(None, wrong)))
        damaged.add(checkpoint.step)


def _from_first(folder: Path, processes: Processes, damaged: set[int], step: int | None) -> Checkpoint | None:
    """Return the tensors that all processes hold, which the first one reads."""
    checkpoint: Checkpoint | None = None

    def read() -> Checkpoint | None:
        nonlocal checkpoint
        if step is None:
            checkpoint = newest_checkpoint(folder, damaged)
        else:
            checkpoint = read_checkpoint(checkpoint_path(folder, step))
        return checkpoint and replace(checkpoint, tensors={part: {} for part in checkpoint.tensors})

    def tensors(part: str) -> Mapping[str, Tensor]:
        assert checkpoint is not None  # only the first process calls this
        return checkpoint.tensors[part]

    head = processes.by_first(read)
    if head is None:
        return None
    received = {part: processes.tensors_by_first(functools.partial(tensors, part)) for part in head.tensors}
    return replace(head, tensors=received)


def _damage(path: Path, files: Mapping[str, Part], processes: Processes) -> str:
    """Return what is wrong with this process's share of the files of rows."""
    for name in sorted(files)[processes.rank :: processes.world_size]:
        try:
            check_part(path, name, files[name])
        except OSError as error:
            return f"{path}: {reason(error)}"
    return ""


def _read_rows(path: Path, files: Mapping[str, Part], rows: range) -> dict[str, Tensor]:
    """Read some rows of a divided classifier, of files that may have others; no other row is read."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, part in files.items():
        start, stop = (int(number) for number in name.removesuffix(SUFFIX).split("-")[1:])
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            with safe_open(check_regular(path / name, part.bytes), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # it is no dict
                    read = file.get_slice(key)[first - start : last - start]
                    parts.setdefault(key, []).append((first, read))
    return {key: joined_rows(key, pieces, rows) for key, pieces in parts.items()}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def write_checkpoint(
    folder: Path, checkpoint: Checkpoint, processes: Processes = ALONE, rows: range | None = None
) -> Path:
    """Write a checkpoint; one of the same step is replaced."""
    path = checkpoint_path(folder, checkpoint.step)
    processes.by_first(lambda: make_folder(folder))
    with replaced_by_all(path, processes) as new:

        def write() -> dict[str, Part]:
            parts = {}
            if rows is not None:
                name = f"rows-{rows.start:09d}-{rows.stop:09d}{SUFFIX}"
                parts[name] = replace(write_share(new / name, checkpoint.rows), facts={})
            if processes.is_first:
                for part, tensors in checkpoint.tensors.items():
                    written = write_share(new / (part + SUFFIX), tensors)
                    parts[part + SUFFIX] = replace(written, facts={})
                fields = {"step": checkpoint.step, **checkpoint.state}
                state = json.dumps(fields, indent=1, sort_keys=True, allow_nan=False).encode()
                write_file(new / STATE, state)
                parts[STATE] = part_of(state)
            return parts

        shares = processes.gather_to_first(processes.together(write))
        manifest = Manifest({name: part for parts in shares for name, part in parts.items()})
        processes.by_first(lambda: write_file(new / MANIFEST, manifest.written()))
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, without the rows of a divided classifier.

    Raises:
        DamagedCheckpointError: if a byte of it has changed.
    """
    try:
        parts = dict(Manifest.read(read_file(path / MANIFEST, MAX_JSON_BYTES)).parts)
        row_files = {name: parts.pop(name) for name in list(parts) if ROW_FILE.fullmatch(name)}
        data = {name: read_part(path, name, part) for name, part in parts.items()}
        state = parse(data.pop(STATE), STATE, MAX_JSON_BYTES)
        tensors = {name.removesuffix(SUFFIX): safetensors.torch.load(part) for name, part in data.items()}
        return Checkpoint(step=state.pop("step"), tensors=tensors, state=state, row_files=row_files)
    except (OSError, BundleError, SafetensorError, KeyError) as error:
        raise DamagedCheckpointError(f"{path}: {reason(error)}") from error


def newest_checkpoint(folder: Path, damaged: Collection[int] = ()) -> Checkpoint | None:
    """Return the newest valid checkpoint, with a warning for each damaged one; ``None`` if there is none.

    Args:
        folder: the folder of checkpoints.
        damaged: steps of checkpoints that are known to be damaged.

    Raises:
        DamagedCheckpointError: if there are checkpoints, and none is valid.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        if _step(path) in damaged:
            continue
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
            rename_folder(path, aside)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if NAME.fullmatch(path.name)), key=_step)


def remove_old_checkpoints(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the last few and that of the best epoch."""
    for path in list_checkpoints(folder)[:-keep]:
        if _step(path) != best_step:
            (path / MANIFEST).unlink(missing_ok=True)  # first: a kill must not leave a valid part
            remove_folder(path)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
