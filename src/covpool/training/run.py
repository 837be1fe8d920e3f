"""Train a recipe, or compare two poolings: open the data, train, test the best model, write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.arguments import CLASS_TOKEN
from covpool.data.image_set import ImageSet
from covpool.errors import Interrupted, UsageError
from covpool.models.bundle import load_model, load_together, read_card
from covpool.models.card import versions
from covpool.models.divided import count_parameters
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_together
from covpool.nn.pooling import check_method
from covpool.processes import Processes, Signals, caught_signals, joined_processes
from covpool.provenance import describe_machine, describe_source, machine_name
from covpool.storage.folders import LOCK, check_outside, held
from covpool.terminal import counted
from covpool.training.metrics import METRICS, widest_interval
from covpool.training.network import own_state
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import SHORT, change_pool, flat, make_recipe, read_recipe, write_recipe
from covpool.training.run_folder import BadImages, RunFolder, as_begun
from covpool.training.splits import Splits, joined, open_data
from covpool.training.trainer import Trainer

LOGGER = logging.getLogger("covpool")
# After 19 steps isqrt_cov was less accurate than GAP on 5 species of sparrows; after 240, more on 21.
FEW_STEPS = 50
# From fewer images a network that starts from random weights learns little.
FEW_IMAGES = 5000
# On fewer images the 95 % interval of an accuracy is wider than ±10 points.
FEW_TO_MEASURE = 96


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: the folder of the run; ``bundle`` is the model, ``report.html`` the report.
        summary: the results, as in ``summary.json``.
        was_finished: whether the run was finished before.
        images: the images on which the metrics were measured; ``None`` if there were none.
    """

    folder: Path
    summary: dict[str, Any]
    was_finished: bool
    images: ImageSet | None

    @property
    def model(self) -> PooledClassifier:
        """The best model, loaded from the bundle."""
        return load_model(self.folder / "bundle")

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics on the test images, else on the validation images; empty without both."""
        return self.summary["metrics"] or {}

    @property
    def report(self) -> Path:
        """The page to open in a browser."""
        return self.folder / "report.html"


def train(
    data: str | Path, recipe: str | Path | None = None, out: str | Path | None = None, **changes: Any
) -> Run:
    """Train a network on images, or resume the interrupted run in its folder, as ``covpool train`` does.

    Args:
        data: a folder of classes, with or without train, val and test, or any other source of images.
        recipe: one of :func:`covpool.training.recipe_names`, or a ``.yaml`` file; see
            :func:`covpool.training.read_recipe` for the default.
        out: folder of the run (default: ``runs/`` and the name of the data).
        **changes: keys of the recipe by the short names of the command line: ``model="resnet50"``,
            ``pretrained=True``, ``epochs=30``. Pass others in a dict: ``**{"optimizer.lr": 0.01}``.

    Example:
        >>> covpool.train("birds", "modern", epochs=30).metrics["top1"]  # doctest: +SKIP
        0.87
    """
    given = {"data": str(data), **changes} | ({} if out is None else {"out": str(out)})
    return train_recipe(read_recipe(recipe, {SHORT.get(name, name): value for name, value in given.items()}))


def train_recipe(recipe: Recipe) -> Run:
    """Train a recipe, or resume the interrupted run in its folder.

    Under torchrun all processes call it and share the work. The random state and the deterministic mode of
    torch are restored at the end.

    Raises:
        UsageError: if the recipe, the images or the folder are not valid, or another process uses the folder.
        Interrupted: after SIGTERM or Ctrl-C, with a checkpoint written.

    Example:
        >>> from covpool.training import read_recipe, train_recipe
        >>> recipe = read_recipe("modern", {"data.path": "birds", "out": "runs/birds"})
        >>> run = train_recipe(recipe)  # doctest: +SKIP
        >>> run.summary["metrics"]["top1"]  # doctest: +SKIP
        0.87
    """
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(joined_processes(recipe.loop.device, recipe.loop.timeout))
        signals = stack.enter_context(caught_signals())
        stack.enter_context(own_state(processes, recipe.loop.deterministic))
        folder = RunFolder(Path(recipe.out))
        processes.by_first(lambda: as_begun(folder.recipe, recipe))  # before the data, which may take long
        splits = processes.together(lambda: _opened(recipe))
        processes.by_first(lambda: stack.enter_context(_locked(folder.path)))
        recipe = processes.by_first(lambda: as_begun(folder.recipe, recipe))
        summary = processes.by_first(folder.read_summary)
        was_finished = summary is not None
        if summary is None:
            summary = _train(recipe, processes, signals, folder, splits)
        elif summary["fingerprints"] != splits.fingerprints:
            processes.fail(UsageError(f"{folder.path} is a run on other images: use another --out"))
        if number := max(processes.gather(signals.received)):  # do not start another run
            raise Interrupted(number, f"stopped when {folder.path} was finished")
        return Run(folder.path, summary, was_finished, splits.reported()[1])


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; an error before the first file removes the folder again."""
    is_new = not folder.exists()
    with held(folder):
        try:
            yield
        finally:
            if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()


def _opened(recipe: Recipe) -> Splits:
    """Open the images, and check that the recipe works on them."""
    check_outside(recipe.out, recipe.data.path, "files of the run")
    splits = open_data(recipe.data, recipe.seed)
    if recipe.batch_size > len(splits.train):
        raise UsageError(
            f"--batch-size {recipe.batch_size} is larger than the training set "
            f"({counted(len(splits.train), 'image')}): use a smaller one"
        )
    if recipe.validation.refit:
        if splits.val is None or splits.test is None:
            raise UsageError("--validation.refit needs validation images and test images; some are missing")
        joined(splits.train, splits.val)
    if recipe.schedule.milestones and min(recipe.schedule.milestones) >= recipe.schedule.epochs:
        LOGGER.warning("the learning rate never falls: its first milestone comes after the last epoch")
    weights = recipe.weights
    if not (weights.pretrained or weights.path or weights.bundle) and len(splits.train) < FEW_IMAGES:
        LOGGER.warning(
            "training from scratch on %s ends far below a pretrained backbone: use 'covpool fit %s', or add "
            "--pretrained",
            counted(len(splits.train), "image"),
            recipe.data.path,
        )
    _, images = splits.reported()
    if images is not None and len(images) < FEW_TO_MEASURE:
        LOGGER.warning(
            "accuracy is measured on %s, so its 95 %% interval is up to ±%.0f points; 'covpool fit' uses "
            "cross-validation where there are no test images",
            counted(len(images), "image"),
            widest_interval(len(images)),
        )
    alone = recipe.schedule.head_epochs * (len(splits.train) // recipe.batch_size)
    if recipe.model.is_second_order and recipe.schedule.head_first and alone < FEW_STEPS:
        LOGGER.warning(
            "the new layers train alone for %s only, too few for covariance pooling: use more --epochs",
            counted(alone, "step"),
        )
    return splits


def _train(
    recipe: Recipe, processes: Processes, signals: Signals, folder: RunFolder, splits: Splits
) -> dict[str, Any]:
    bad = BadImages(folder, processes, recipe.data.max_bad)
    trainer = processes.together(
        lambda: Trainer(recipe, processes, signals, splits=splits, folder=folder, bad=bad)
    )
    resolved = dataclasses.replace(recipe, model=trainer.model.config)
    processes.by_first(lambda: write_recipe(resolved, folder.recipe))
    trainer.run()
    final = _refitted(trainer, splits) if recipe.validation.refit else trainer
    split, images = splits.reported()
    evaluation: dict[str, Any] = {}
    if images is not None:
        final.journal.progress.line(f"measure the accuracy on {counted(len(images), 'image')} of {split}")
        load_together(final.learner.best_weights, final.folder.bundle, processes)
        predictions, metrics = final.evaluate(images)
        evaluation = {"split": split, "metrics": metrics}
        processes.by_first(lambda: folder.write_predictions(predictions, images))
    # The time in training, over all sessions of a resumed run.
    seconds = sum(epoch["seconds"] for each in {trainer, final} for epoch in each.progress.history)
    summary = _summary(trainer, splits, seconds) | evaluation
    # Maps of evidence need a whole classifier.
    model = final.learner.best_weights if final.learner.classifier is None else None
    final.journal.progress.line("write the report")
    processes.by_first(lambda: _finish(folder, summary, images, model))
    return summary


def _refitted(trainer: Trainer, splits: Splits) -> Trainer:
    """Train again on train and val together, for as many epochs as were best."""
    assert trainer.best is not None
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
        epochs=trainer.best["epoch"],
    )
    again.run()
    trainer.progress.skips += again.progress.skips
    save_together(
        again.learner.best_weights,
        trainer.folder.bundle,
        again.processes,
        metrics=again.processes.by_first(lambda: read_card(folder.bundle).metrics),
        recipe=dataclasses.asdict(trainer.recipe),
    )
    return again


def _finish(
    folder: RunFolder, summary: dict[str, Any], images: ImageSet | None, model: PooledClassifier | None
) -> None:
    from covpool.training.report import write_report  # here, because matplotlib takes seconds to import

    folder.write_summary({**summary, "finished": False})  # for the report, which may fail
    write_report(folder.path, images, model)
    folder.write_summary({**summary, "finished": True})


def _summary(trainer: Trainer, splits: Splits, seconds: float) -> dict[str, Any]:
    progress, config, model = trainer.progress, trainer.model.config, trainer.model
    best = trainer.best or {}
    return {
        "split": None,
        "metrics": None,
        "validation": {name: best[name] for name in ("loss", *METRICS)} if "top1" in best else None,
        "best_epoch": best.get("epoch"),
        "last_epoch": progress.history[-1],
        "epochs": len(progress.history),
        "steps": progress.cursor,
        "seconds": seconds,
        "parameters": count_parameters(model),
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
        "source": describe_source(("functional", "nn", "models", "data", "training")),
        "versions": versions(),
        "machine": machine_name(describe_machine(trainer.processes.device.type)),
    }


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        folder: has a folder for each run, named by its pooling.
        runs: the runs by pooling.
        report: the report on both; ``None`` in all processes but the first.
    """

    folder: Path
    runs: dict[str, Run]
    report: Path | None


def compare(recipe: Recipe, other_pool: str = "gap") -> Comparison:
    """Train the network of a recipe, then the same network with another pooling.

    Everything else is the same: images, order, augmentation, seed and epochs. First-order pooling drops the
    options for covariance pooling: see :func:`~covpool.training.recipe_files.change_pool`. Call it again to
    resume after an interruption.
    """
    from covpool.training.report import write_comparison

    folder = Path(recipe.out)
    both = compared_recipes(recipe, other_pool)
    with joined_processes(recipe.loop.device, recipe.loop.timeout) as processes:  # once for both runs
        runs = {pool: train_recipe(each) for pool, each in both.items()}
        report = None
        if processes.is_first:
            images = runs[other_pool].images
            report = write_comparison(folder, {pool: run.folder for pool, run in runs.items()}, images)
    return Comparison(folder, runs, report)


def compared_recipes(recipe: Recipe, other_pool: str) -> dict[str, Recipe]:
    """Return the recipe and the one with another pooling, each with its own folder."""
    check_method("compare", other_pool, CLASS_TOKEN)
    first_pool = recipe.model.pool
    if other_pool == first_pool:
        raise UsageError(f"--compare {other_pool} is the pooling of the recipe: choose another")
    if recipe.weights.bundle is not None:
        raise UsageError(
            f"a bundle fits one pooling, not both {first_pool} and {other_pool}: remove --bundle"
        )
    values = {first_pool: flat(recipe), other_pool: change_pool(flat(recipe), other_pool)}
    out = Path(recipe.out)
    both = {pool: make_recipe({**values[pool], "out": str(out / pool)}) for pool in values}
    if both[other_pool].model.is_second_order and not both[first_pool].model.is_second_order:
        # The recipe has no width and no resolution for it.
        raise UsageError(f"compare the other way round: --pool {other_pool} --compare {first_pool}")
    return both
