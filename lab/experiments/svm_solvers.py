"""Compare LinearSVC with the streaming solver on the same features, at the size of CUB-200-2011.

    python -m lab svm_solvers SETS RUNS

Run the case ``cub-lite0-224`` of :mod:`lab.experiments.fine_grained` first, with the same RUNS: its first
isqrt_cov head gives 11,988 rows of 8,256 values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from covpool.data.sources import open_splits
from covpool.evaluate.probe.features import Extractor, frozen_config, unit_vectors
from covpool.evaluate.svm.solvers import LinearScores, Problem, solve_in_memory, solve_streaming
from covpool.inference.store import RowFile
from covpool.models.bundle import load_model
from covpool.models.create import build_model
from lab.experiments.fine_grained import CASES, weights_file
from lab.record import new_record, record_file, write_record

CASE = next(case for case in CASES if case.name == "cub-lite0-224")
HEAD = "isqrt_cov"
PACKAGES = ("functional", "nn", "models", "data", "evaluate")


def run(sets: Path, runs: Path, scratch: Path) -> dict[str, Any]:
    """Run both solvers, and compare their scores on the test images."""
    model = load_model(runs / f"{CASE.name}-d{CASE.dim}" / "heads" / HEAD)
    vectors, labels = {}, {}
    options = CASE.options()
    frozen = frozen_config(model.config)
    built = build_model(frozen, checkpoint_path=weights_file(CASE.backbone), key_map=options.key_map)
    extractor = Extractor(built, options, runs / "cache", {"features"}, torch.device("cpu"))
    for split, images in open_splits(sets / CASE.data).items():
        store = extractor.store(images, lambda done, total: None)
        cached = extractor.extract(images, store, lambda done, total: None)
        vectors[split] = unit_vectors(model, cached).numpy()
        labels[split] = cached.labels[cached.usable]
    train = vectors["train"].reshape(-1, vectors["train"].shape[-1])
    file = RowFile.create(scratch / "rows.npy", *train.shape)
    file.write(np.arange(len(train)), train)
    problem = Problem(file, np.arange(len(train)), np.tile(labels["train"], 2), model.num_classes)
    passes: list[float] = []
    scores_of, seconds = {}, {}
    solvers: dict[str, Callable[[], LinearScores]] = {
        "streaming": lambda: solve_streaming(problem, scratch, passes=lambda _, worst: passes.append(worst)),
        "LinearSVC": lambda: solve_in_memory(problem),
    }
    for name, solve in solvers.items():
        started = time.process_time()
        scores_of[name] = _scores(solve(), vectors["test"])
        seconds[name] = round(time.process_time() - started, 1)
    return {
        **new_record("svm_solvers", PACKAGES, {"case": CASE.name}, seed=0),
        "rows": list(train.shape),
        "classes": problem.classes,
        "passes": len(passes),
        "cpu_seconds": seconds,
        "top1_flip": {
            name: float((scores.mean(axis=0).argmax(axis=1) == labels["test"]).mean())
            for name, scores in scores_of.items()
        },
        "largest_difference": float(np.abs(scores_of["streaming"] - scores_of["LinearSVC"]).max()),
        "largest_score": float(np.abs(scores_of["LinearSVC"]).max()),
    }


def _scores(solved: LinearScores, test: Any) -> Any:
    return np.stack([solved.of(view) for view in test])


def main(sets: Path, runs: Path, file: Path | None = None) -> None:
    """Compare LinearSVC with the streaming solver. Run ``fine_grained`` first, with the same folders.

    Args:
        sets: folder with cub, which has train and test by class.
        runs: folder of the training runs of fine_grained.
        file: results file; by default that of this machine in results/.
    """
    results = run(sets, runs, runs)
    write_record(file or record_file(results), results)
    print({name: results[name] for name in ("top1_flip", "largest_difference", "cpu_seconds")})
