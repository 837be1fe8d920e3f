"""A recipe to a run: data, training, the best model, the test, the report."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.data.image_set import ImageSet
from covpool.models.bundles.bundle import load_model, save_model
from covpool.models.bundles.tensors import versions
from covpool.provenance.machine import describe_machine, machine_name
from covpool.provenance.source import describe_source
from covpool.train.interruption import Signals, caught_signals
from covpool.train.network import make_deterministic
from covpool.train.processes import Processes, joined_processes
from covpool.train.recipe import Recipe
from covpool.train.recipe_files import write_recipe
from covpool.train.run_folder import RunFolder
from covpool.train.same_run import check_same_run
from covpool.train.splits import Splits, joined, open_data
from covpool.train.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        folder: with everything in it; ``bundle`` is the model, ``report.html`` is for people.
        summary: what it came to, as in ``summary.json``.
        was_finished: whether there was nothing left to do.
    """

    folder: Path
    summary: dict[str, Any]
    was_finished: bool


def fit(recipe: Recipe) -> Run:
    """Train as a recipe says, or go on where a run in the same folder was stopped.

    Under torchrun all processes call it, and divide the work among themselves.

    Raises:
        ValueError: in a sentence, if the recipe, the images or the folder are not what they should be.
        Interrupted: after SIGTERM or Ctrl-C, with a checkpoint written.

    Example:
        >>> from covpool.train import fit, read_recipe
        >>> run = fit(read_recipe("modern", {"data.path": "birds", "out": "runs/birds"}))  # doctest: +SKIP
        >>> run.summary["metrics"]["top1"]  # doctest: +SKIP
        0.87
    """
    with joined_processes(recipe.loop.device) as processes, caught_signals() as signals:
        folder = RunFolder(Path(recipe.out))
        summary = processes.by_first(folder.read_summary)
        if summary is not None:
            return Run(folder.path, summary, was_finished=True)
        if recipe.loop.deterministic:
            make_deterministic()
        processes.by_first(lambda: folder.path.mkdir(parents=True, exist_ok=True))
        return Run(folder.path, _train(recipe, processes, signals, folder), was_finished=False)


def _train(recipe: Recipe, processes: Processes, signals: Signals, folder: RunFolder) -> dict[str, Any]:
    started = time.monotonic()
    processes.by_first(lambda: check_same_run(folder.recipe, recipe))
    splits = open_data(recipe.data, recipe.seed)
    trainer = Trainer(recipe, processes, signals, train=splits.train, val=splits.val, folder=folder)
    resolved = dataclasses.replace(recipe, model=trainer.model.config)
    processes.by_first(lambda: write_recipe(resolved, folder.recipe))
    trainer.run()
    final = _refitted(trainer, splits) if recipe.validation.refit else trainer
    split, images = splits.reported()
    summary = _summary(trainer, splits, time.monotonic() - started)
    if images is not None:
        _load_best(final)
        predictions, metrics = final.evaluate(images)
        summary |= {"split": split, "metrics": dataclasses.asdict(metrics)}
        processes.by_first(lambda: folder.write_predictions(predictions, images))
    processes.by_first(lambda: _finish(folder, summary, images))
    return summary


def _finish(folder: RunFolder, summary: dict[str, Any], images: ImageSet | None) -> None:
    from covpool.train.report import write_report  # here, because what draws takes seconds to import

    folder.write_summary({**summary, "finished": False})  # for the report, which may yet fail
    write_report(folder.path, images)
    folder.write_summary({**summary, "finished": True})


def _refitted(trainer: Trainer, splits: Splits) -> Trainer:
    """Trained once more, on train and val together, for as many epochs as were best."""
    if splits.val is None or splits.test is None:
        raise ValueError("refit is for a run with images to validate and images to test on")
    assert trainer.progress.best is not None
    folder = RunFolder(trainer.folder.path / "refit")
    if trainer.processes.is_first:
        folder.path.mkdir(exist_ok=True)
    again = Trainer(
        trainer.recipe,
        trainer.processes,
        trainer.signals,
        train=joined(splits.train, splits.val),
        val=None,
        folder=folder,
        epochs=trainer.progress.best["epoch"],
    )
    again.run()
    if again.processes.is_first:
        save_model(again.learner.best_weights, trainer.folder.bundle)
    return again


def _load_best(trainer: Trainer) -> None:
    """The weights of the best epoch, read by the first process for all."""
    is_first = trainer.processes.is_first
    weights = load_model(trainer.folder.bundle).state_dict() if is_first else None
    trainer.learner.best_weights.load_state_dict(trainer.processes.tensors_from_first(weights))


def _summary(trainer: Trainer, splits: Splits, seconds: float) -> dict[str, Any]:
    progress, config, model = trainer.progress, trainer.model.config, trainer.model
    best = progress.best or {}
    names = ("loss", "top1", "top5", "macro_f1", "balanced_accuracy")
    return {
        "split": None,
        "metrics": None,
        "validation": {name: best[name] for name in names} if "top1" in best else None,
        "best_epoch": best.get("epoch"),
        "last_epoch": progress.history[-1],
        "epochs": len(progress.history),
        "steps": progress.cursor,
        "seconds": seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images": splits.counts(),
        "classes": list(splits.train.classes),
        "model": config.backbone,
        "pool": config.pool,
        "dim": config.dim,
        "image_size": trainer.preprocessing.size,
        "bad_images": len(trainer.bad),
        "skipped_steps": progress.skips,
        "processes": trainer.processes.world_size,
        "seed": trainer.recipe.seed,
        "source": describe_source(("functional", "nn", "models", "data", "train")),
        "versions": versions(),
        "machine": machine_name(describe_machine(trainer.processes.device.type)),
    }
