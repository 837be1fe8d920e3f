"""The contest of heads on frozen backbones: see ``lab/contest.md`` for the protocol.

    python -m lab contest SETS RUNS [--cells [cub-lite0-224:attentive]]

A cell is a head on a set with a backbone. Results are written after every training. Rerun the command to
resume where it stopped, also if RUNS is lost. Several processes may run different cells at once.
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from covpool.closed_form.solve import Solution
from covpool.evaluate.probe import ProbeOptions
from covpool.evaluate.probe.features import fit_head, read_rows, vector_of
from covpool.models.config import ModelConfig, arrays_of, head_config
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.nn import CovPool
from covpool.provenance import machine_name
from lab.experiments.cached_set import CachedSet, Ids, parts_of
from lab.experiments.contest_heads import (
    CASES,
    CLOSED,
    FUSED,
    HEADS,
    NAME,
    ROUNDS,
    SEEDS,
    SPLITS,
    SURVIVORS,
    TESTED_ON,
    TRAINED,
    Case,
    Setting,
    best_trial,
    further_trials,
    settings_of,
    trial_factor,
    trial_name,
    unfinished,
    untried,
)
from lab.experiments.contest_table import page
from lab.experiments.one_pass import BACKBONES, DIMS
from lab.record import new_record, resumable_file, resumed, write_record


@dataclasses.dataclass
class Standardized:
    """A cached array whose channels have mean 0 and standard deviation 1 over the training images."""

    array: NDArray[Any]
    mean: Tensor
    deviation: Tensor

    def __getitem__(self, chosen: Any) -> NDArray[np.float32]:
        # By torch: numpy takes three times as long to convert half precision.
        values = torch.from_numpy(np.asarray(self.array[chosen])).float()
        standardized: NDArray[np.float32] = values.sub_(self.mean).div_(self.deviation).numpy()
        return standardized


class QuickDropout(nn.Dropout):
    """Dropout with one random byte per value: a quarter of the time on a CPU.

    Rates are rounded to 1/256, which is exact for those of the contest.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Set random values to zero, and divide the others by their probability."""
        if not self.training or not self.p:
            return x
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()].view(x.shape) >= round(256 * self.p)
        return x * (kept.to(x.dtype) / (1 - self.p))


class Contest:
    """The cells of a case."""

    def __init__(self, case: Case, cached: CachedSet) -> None:
        self.case, self.cached = case, cached
        self.train, self.test = cached.all_of("train"), cached.all_of("test")
        self.expands: bool = cached.probing.expands
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    def config(self, head: str, setting: Setting) -> ModelConfig:
        """Return the config of a head."""
        config = head_config(
            head,
            self.cached.probing.backbone,
            self.cached.options.dim,
            setting.drop_rate,
            expands=self.expands,
        )
        return dataclasses.replace(config, features="stage") if setting.features == "stage" else config

    def trained(
        self, head: str, setting: Setting, ids: Ids, epochs: int, seed: int
    ) -> tuple[PooledClassifier, Mapping[str, Any]]:
        """Train a head on some images, and return it with the features that it reads."""
        config = self.config(head, setting)
        cached = self.cached.cached
        if setting.input == "standardized":
            cached = {split: self._standardized(features, config) for split, features in cached.items()}
        options: ProbeOptions = dataclasses.replace(
            self.cached.options, lr=setting.lr, weight_decay=setting.weight_decay, epochs=max(1, epochs)
        )
        torch.manual_seed(seed)
        model = build_model(config)  # the backbone is not used
        model.head.drop = QuickDropout(setting.drop_rate)
        if head in FUSED:
            model.pool.compile()
        fit_head(model, cached["train"], ids, options, seed, lambda done, total: None)
        return model, cached

    def _standardized(self, features: Any, config: ModelConfig) -> Any:
        arrays = dict(features.arrays)
        for name in arrays_of(config):
            arrays[name] = Standardized(features.arrays[name], *self._statistics(name))
        return dataclasses.replace(features, arrays=arrays)

    def _statistics(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation of every channel of a cached array."""
        if name in self._known:
            return self._known[name]
        chosen = self.train[:: max(1, len(self.train) // 512)]
        values = self.cached.cached["train"].arrays[name][chosen, 0].astype(np.float32)
        axes = (0, *range(2, values.ndim))
        mean, deviation = values.mean(axis=axes), values.std(axis=axes) + 1e-6
        shape = (-1, *[1] * (values.ndim - 2))
        known = torch.from_numpy(mean).reshape(shape), torch.from_numpy(deviation).reshape(shape)
        return self._known.setdefault(name, known)

    def right(
        self, model: PooledClassifier, cached: Mapping[str, Any], split: str, ids: Ids
    ) -> NDArray[np.bool_]:
        """Return which images a head classifies correctly, without their flips."""
        hits, device = [], torch.device("cpu")
        with torch.no_grad():
            for some in parts_of(ids):
                rows = read_rows(cached[split], model, some, np.zeros_like(some), device)
                hits.append(model.classify(*vector_of(model, rows)).argmax(dim=1) == rows.labels)
        return torch.cat(hits).numpy()

    def split(self, number: int) -> tuple[Ids, Ids]:
        """Return the images to train on and a held-out third of every class."""
        random, labels = np.random.default_rng([number, 44]), self.cached.cached["train"].labels
        held_out = []
        for k in np.unique(labels[self.train]):
            of_class = random.permutation(self.train[labels[self.train] == k])
            held_out.append(of_class[: len(of_class) // 3])
        aside = np.sort(np.concatenate(held_out))
        return np.setdiff1d(self.train, aside), aside

    def held_out(self, head: str, setting: Setting, share: float, split: int) -> dict[str, Any]:
        """Train on two thirds of the training images, and return the accuracy on the others."""
        ids, aside = self.split(split)
        started = time.process_time()
        model, cached = self.trained(head, setting, ids, round(share * self.case.epochs), split)
        accuracy = float(self.right(model, cached, "train", aside).mean())
        return {"top1": accuracy, "seconds": round(time.process_time() - started, 1)}

    def seed(self, head: str, setting: Setting, seed: int, epochs: int) -> dict[str, Any]:
        """Train on all training images, and return which test images are right."""
        started = time.process_time()
        model, cached = self.trained(head, setting, self.train, epochs, seed)
        right = self.right(model, cached, "test", self.test)
        return {
            "epochs": epochs,
            "top1": float(right.mean()),
            "right": "".join("01"[int(hit)] for hit in right),
            "seconds": round(time.process_time() - started, 1),
        }

    def closed(self, head: str, dim: int, ids: Ids, split: str, measured: Ids) -> dict[str, Any]:
        """Solve a fixed head from training images, and return which of the measured images are right."""
        started = time.process_time()
        if head == "gap":
            vectors, others = self.cached.averages("train", ids), self.cached.averages(split, measured)
        else:
            basis = self.cached.basis(ids, dim)
            pool = CovPool(basis.shape[1], head, dim, "channels_first", reduction="linear").eval()
            assert pool.reduction is not None
            with torch.no_grad():
                pool.reduction.projection.weight.copy_(basis)
            vectors = self.cached.pooled(pool, "train", ids)
            others = self.cached.pooled(pool, split, measured)
        solution: Solution = self.cached.solved(vectors, ids)
        right = self.cached.right(solution, split, measured, others)
        return {
            "top1": float(right.mean()),
            "solver": solution.kind,
            "right": "".join("01"[int(hit)] for hit in right),
            "seconds": round(time.process_time() - started, 1),
        }


def run_cell(contest: Contest, head: str, cell: dict[str, Any], factor: float = 1.0) -> Iterator[None]:
    """Choose a setting by successive halving, then train the seeds; yield after every training.

    Args:
        contest: the case.
        head: name of the head.
        cell: its results so far, which are extended.
        factor: of the number of epochs.
    """
    if head in CLOSED:
        yield from _run_closed(contest, CLOSED[head], cell)
        return
    trials, settings = cell.setdefault("trials", {}), settings_of(head, expands=contest.expands)

    def tried(setting: Setting, share: float, splits: int) -> Iterator[None]:
        for split in range(splits):
            if (name := trial_name(setting, share, split)) not in trials:
                trials[name] = contest.held_out(head, setting, share, split)
                yield

    def accuracies(setting: Setting, share: float, splits: int) -> list[float]:
        return [trials[trial_name(setting, share, split)]["top1"] for split in range(splits)]

    for number, (share, splits) in enumerate(ROUNDS):
        means = {}
        for setting in settings:
            yield from tried(setting, factor * share, splits)
            means[setting] = statistics.mean(accuracies(setting, factor * share, splits))
        keep = 1 if number == len(ROUNDS) - 1 else -(-len(settings) // SURVIVORS)
        settings = sorted(settings, key=lambda setting: -means[setting])[:keep]
    for drop, share in further_trials(contest.case, factor):
        setting = settings[0] if drop is None else settings[0]._replace(drop_rate=drop)
        yield from tried(setting, share, SPLITS)
    best, factor, held_out = best_trial(trials)
    while missing := untried(contest.case, best, factor, trials):
        for setting, share in missing:
            yield from tried(setting, share, SPLITS)
        best, factor, held_out = best_trial(trials)
    epochs = round(factor * contest.case.epochs)
    seeds, earlier = cell.setdefault("seeds", {}), Setting(**cell.get("setting", best._asdict()))
    if (best, epochs) != (earlier, cell.get("epochs", contest.case.epochs)):
        seeds.clear()  # of a run with fewer trials
    cell["setting"], cell["epochs"], cell["held_out"] = best._asdict(), epochs, held_out
    for seed in range(SEEDS):
        if str(seed) not in seeds:
            seeds[str(seed)] = contest.seed(head, best, seed, epochs)
            yield


def _run_closed(contest: Contest, head: str, cell: dict[str, Any]) -> Iterator[None]:
    trials, dims = cell.setdefault("trials", {}), DIMS[:1] if head == "gap" else DIMS
    for dim, split in itertools.product(dims, range(SPLITS)):
        if (name := f"{dim},{split}") not in trials:
            ids, aside = contest.split(split)
            trial = contest.closed(head, dim, ids, "train", aside)
            trials[name] = {key: trial[key] for key in ("top1", "solver", "seconds")}
            yield
    means = {
        dim: statistics.mean(trials[f"{dim},{split}"]["top1"] for split in range(SPLITS)) for dim in dims
    }
    dim = max(dims, key=means.__getitem__)
    cell["setting"], cell["held_out"] = {} if head == "gap" else {"dim": dim}, means[dim]
    if "0" not in cell.setdefault("seeds", {}):
        cell["seeds"]["0"] = contest.closed(head, dim, contest.train, "test", contest.test)
        yield


def factor_of(record: Mapping[str, Any], case: Case, head: str) -> float:
    """Return the factor of the epochs of a head in its trials: that of the test, but from a half to one.

    On large sets, the first round of a quarter would have one epoch, and more than all would take hours.
    """
    tested = record["cells"].get(TESTED_ON, {}).get(head, {})
    if case.name == TESTED_ON or "epochs" not in tested:
        return 1.0
    factor = float(tested["epochs"] / next(one.epochs for one in CASES if one.name == TESTED_ON))
    return min(1.0, max(0.5, factor))


def main(sets: Path, runs: Path, cells: tuple[str, ...] = (), weights: Path | None = None) -> None:
    """Run cells of the contest. Rerun the command to resume.

    Args:
        sets: folder with sparrows, cub, cars and flowers, each with train and test by class.
        runs: folder of the cached features.
        cells: cells to run, as [cub-lite0-224:attentive], or cases, as [cub-lite0-224]; all if not given.
        weights: file with the weights of ResNet-50, for its cases.
    """
    record = new_record(NAME, ("functional", "nn", "models", "data", "evaluate", "closed_form")) | {
        "cells": {}
    }
    file = resumable_file(record)

    def save(case: Case, head: str, cell: dict[str, Any], *, done: bool) -> None:
        """Write a cell into the file, to which other processes may have added theirs."""
        with (runs / "writing").open("w") as turn:
            fcntl.lockf(turn, fcntl.LOCK_EX)
            held = resumed(record, file)
            held["cells"].setdefault(case.name, {})[head] = cell
            write_record(file, held, page(held) if done else None)

    runs.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        heads = [head for head in HEADS if not cells or {case.name, f"{case.name}:{head}"} & set(cells)]
        heads = [head for head in heads if f"{case.name}:{head}" in unfinished(resumed(record, file))]
        if not heads or (case.backbone == "resnet50" and weights is None):
            continue
        own_weights = weights if case.backbone == "resnet50" else None
        model, precision = BACKBONES[case.backbone][0], case.precision
        cached = CachedSet(
            sets / case.data, runs, model, case.size, TRAINED, own_weights, precision=precision, compile=True
        )
        contest = Contest(case, cached)
        for head in heads:
            held = resumed(record, file)
            new_cell = {"machine": machine_name(record["machine"])}  # where it began
            cell = held["cells"].get(case.name, {}).get(head, new_cell)
            factor = trial_factor(cell["trials"]) if cell.get("trials") else factor_of(held, case, head)
            for _ in run_cell(contest, head, cell, factor):
                save(case, head, cell, done=False)
            save(case, head, cell, done=True)
            print(f"{case.name}:{head} is done", flush=True)
