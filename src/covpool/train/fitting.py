"""A recipe to a run: data, training, the best model, the test, the report."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.data.image_set import ImageSet
from covpool.durable import check_outside
from covpool.errors import Interrupted, UsageError
from covpool.models.bundle import load_model, read_card, save_model
from covpool.models.model import PooledClassifier
from covpool.models.tensors import versions
from covpool.processes import Processes, Signals, caught_signals, joined_processes
from covpool.provenance.machine import describe_machine, describe_source, machine_name
from covpool.train.metrics import NAMES
from covpool.train.network import make_deterministic
from covpool.train.recipe import Recipe
from covpool.train.recipe_files import write_recipe
from covpool.train.run_folder import BadImages, RunFolder, as_begun
from covpool.train.splits import Splits, joined, open_data
from covpool.train.trainer import Trainer
from covpool.wording import counted

LOGGER = logging.getLogger("covpool")
# With 19, five species of sparrows were told apart worse than by an average; with 240, 21 species better.
FEW_STEPS = 50


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        folder: with everything in it; ``bundle`` is the model, ``report.html`` is for people.
        summary: what it came to, as in ``summary.json``.
        was_finished: whether there was nothing left to do.
        images: those that the summary's metrics were measured on; ``None`` if there were none.
    """

    folder: Path
    summary: dict[str, Any]
    was_finished: bool
    images: ImageSet | None


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
        recipe = processes.by_first(lambda: as_begun(folder.recipe, recipe))
        splits = processes.together(lambda: _opened(recipe))
        summary = processes.by_first(folder.read_summary)
        was_finished = summary is not None
        if summary is None:
            summary = _train(recipe, processes, signals, folder, splits)
        elif summary["fingerprints"] != splits.fingerprints:
            processes.fail(UsageError(f"{folder.path} is of other images than these: give another --out"))
        if number := max(processes.gather(signals.received)):  # all is written; but no other run begins
            raise Interrupted(number, f"stopped when {folder.path} was finished")
        return Run(folder.path, summary, was_finished, splits.reported()[1])


def _opened(recipe: Recipe) -> Splits:
    """The images, once it is clear that the recipe can be carried out on them."""
    check_outside(recipe.out, recipe.data.path, "files of the run")
    splits = open_data(recipe.data, recipe.seed)
    if recipe.batch_size > len(splits.train):
        raise UsageError(
            f"--batch-size is {recipe.batch_size}, and there are {len(splits.train)} images to train on: "
            "give a smaller one"
        )
    if recipe.validation.refit:
        if splits.val is None or splits.test is None:
            raise UsageError(
                "--validation.refit is for images to validate and images to test on; some are missing"
            )
        joined(splits.train, splits.val)
    if recipe.schedule.milestones and min(recipe.schedule.milestones) >= recipe.schedule.epochs:
        LOGGER.warning("the learning rate never falls: its first milestone comes after the last epoch")
    alone = recipe.schedule.head_epochs * (len(splits.train) // recipe.batch_size)
    if recipe.model.is_second_order and recipe.schedule.head_first and alone < FEW_STEPS:
        LOGGER.warning(
            "new layers learn alone for %s only, too few for those of a covariance: give more --epochs",
            counted(alone, "step"),
        )
    return splits


def _train(
    recipe: Recipe, processes: Processes, signals: Signals, folder: RunFolder, splits: Splits
) -> dict[str, Any]:
    if recipe.loop.deterministic:
        make_deterministic()
    bad = BadImages(folder, processes, recipe.data.max_bad)
    trainer = processes.together(
        lambda: Trainer(recipe, processes, signals, splits=splits, folder=folder, bad=bad)
    )
    resolved = dataclasses.replace(recipe, model=trainer.model.config)
    processes.by_first(lambda: _begin(folder, resolved))
    trainer.run()
    final = _refitted(trainer, splits) if recipe.validation.refit else trainer
    split, images = splits.reported()
    found: dict[str, Any] = {}
    if images is not None:
        _load_best(final)
        predictions, metrics = final.evaluate(images)
        found = {"split": split, "metrics": dataclasses.asdict(metrics)}
        processes.by_first(lambda: folder.write_predictions(predictions, images))
    # Of training alone, and of all sessions of a run that was stopped.
    seconds = sum(epoch["seconds"] for one in {trainer, final} for epoch in one.progress.history)
    summary = _summary(trainer, splits, seconds) | found
    processes.by_first(lambda: _finish(folder, summary, images, final.learner.best_weights))
    return summary


def _begin(folder: RunFolder, recipe: Recipe) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    write_recipe(recipe, folder.recipe)


def _finish(
    folder: RunFolder, summary: dict[str, Any], images: ImageSet | None, model: PooledClassifier
) -> None:
    from covpool.train.report import write_report  # here, because what draws takes seconds to import

    folder.write_summary({**summary, "finished": False})  # for the report, which may yet fail
    write_report(folder.path, images, model)
    folder.write_summary({**summary, "finished": True})


def _refitted(trainer: Trainer, splits: Splits) -> Trainer:
    """Trained once more, on train and val together, for as many epochs as were best."""
    assert trainer.progress.best is not None
    assert splits.val is not None
    folder = RunFolder(trainer.folder.path / "refit")
    trainer.processes.by_first(lambda: folder.path.mkdir(exist_ok=True))
    again = Trainer(
        trainer.recipe,
        trainer.processes,
        trainer.signals,
        splits=Splits(joined(splits.train, splits.val), None, None),
        folder=folder,
        bad=trainer.bad,
        epochs=trainer.progress.best["epoch"],
    )
    again.run()
    trainer.progress.skips += again.progress.skips
    again.processes.by_first(
        lambda: save_model(
            again.learner.best_weights,
            trainer.folder.bundle,
            metrics=read_card(folder.bundle).metrics,
            recipe=dataclasses.asdict(trainer.recipe),
        )
    )
    return again


def _load_best(trainer: Trainer) -> None:
    """The weights of the best epoch, read by the first process for all."""
    read = trainer.processes.tensors_by_first(lambda: load_model(trainer.folder.bundle).state_dict())
    trainer.learner.best_weights.load_state_dict(read)


def _summary(trainer: Trainer, splits: Splits, seconds: float) -> dict[str, Any]:
    progress, config, model = trainer.progress, trainer.model.config, trainer.model
    best = progress.best or {}
    return {
        "split": None,
        "metrics": None,
        "validation": {name: best[name] for name in NAMES} if "top1" in best else None,
        "best_epoch": best.get("epoch"),
        "last_epoch": progress.history[-1],
        "epochs": len(progress.history),
        "steps": progress.cursor,
        "seconds": seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images": {name: len(images) for name, images in splits.sets().items()},
        "fingerprints": splits.fingerprints,
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
