"""The training loop: epochs, steps, validation and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from covpool.data.image_set import ImageSet
from covpool.data.loader import Batch, EvaluationLoader
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.errors import (
    BundleError,
    DamagedCheckpointError,
    DataError,
    Interrupted,
    NotFiniteError,
    ReportedByFirstError,
    TrainingError,
)
from covpool.inference.forward import Forward
from covpool.models.bundle import read_card
from covpool.models.card import plain_json
from covpool.models.saving import check_savable, save_together
from covpool.processes import ALONE, Processes, Signals
from covpool.training.checkpoint import (
    Progress,
    load_learner,
    remove_old_checkpoints,
    shared_checkpoint,
    to_checkpoint,
    write_checkpoint,
)
from covpool.training.journal import Journal
from covpool.training.metrics import Metrics, Predictions, measure, predict
from covpool.training.network import make_model
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import flat
from covpool.training.run_folder import FREE, BadImages, RunFolder, differences
from covpool.training.splits import Splits, make_loader
from covpool.training.step import Learner, make_objective


class Trainer:
    """Train the network of a recipe, and keep the weights of the best epoch.

    Args:
        recipe: the recipe.
        processes: the processes that train together.
        signals: the signals that ask to stop.
        splits: the images. Without ``val``, the last epoch counts as the best.
        folder: where the files go.
        bad: the list of unreadable images, to which it adds.
        epochs: stop after this many epochs, if before the end of the schedule.
    """

    def __init__(
        self,
        recipe: Recipe,
        processes: Processes,
        signals: Signals,
        *,
        splits: Splits,
        folder: RunFolder,
        bad: BadImages,
        epochs: int | None = None,
    ) -> None:
        self.recipe, self.processes, self.signals = recipe, processes, signals
        self.splits, self.folder, self.bad = splits, folder, bad
        self.epochs = epochs or recipe.schedule.epochs
        self.model = make_model(recipe, splits.train.classes, processes)
        check_savable(self.model)
        self.preprocessing = Preprocessing.of(self.model.pretrained_cfg)
        self.loader = make_loader(splits.train, recipe, self.preprocessing, processes)
        self._val_loader = None if splits.val is None else self._evaluation_loader(splits.val)
        self.batches = self.loader.batches
        objective = make_objective(recipe, splits.train, self.model)
        self.learner = Learner(self.model, recipe, processes, objective, self.batches)
        self.progress = Progress()
        self._origin = processes.by_first(self._describe_origin)
        self._resume()
        self.journal = Journal(recipe, processes, folder, self.progress.cursor, self.batches, self.epochs)
        self._saved_at = time.monotonic()

    @property
    def best(self) -> dict[str, Any] | None:
        """The row of the best epoch so far: by the monitored metric, or the last without validation."""
        history, monitor = self.progress.history, self.recipe.validation.monitor
        if self.splits.val is None:
            return history[-1] if history else None
        # Weights that overflow predict some class too. A checkpoint stores NaN as None.
        finite = [row for row in history if row["loss"] is not None and math.isfinite(row["loss"])]
        return max(finite, key=lambda row: row[monitor], default=None)  # the first of equal ones

    def run(self) -> None:
        """Train to the end, from the start or from the last checkpoint."""
        with self.journal:
            self.journal.begin(self.model, len(self.splits.train))
            while not self._is_done():
                if self.progress.cursor == self.batches * (len(self.progress.history) + 1):
                    self._end_epoch()
                else:
                    self._train_epoch()
        if self.best is None or (self.splits.val is None and self.best["train_loss"] is None):
            sentence = (
                "the loss is not finite at the end of any epoch"
                if self.best is None
                else ("every step of the last epoch was skipped, because its loss or gradient was not finite")
            )
            self.processes.fail(NotFiniteError(f"{sentence}, so there is no model: use a lower --lr"))

    def evaluate(self, images: ImageSet) -> tuple[Predictions, Metrics]:
        """Return the predictions of the best weights, in every process, and their metrics."""
        model = self.learner.best_weights
        self.processes.broadcast_buffers(model)
        loader = (self._val_loader if images is self.splits.val else None) or self._evaluation_loader(images)
        precision = self.recipe.loop.precision

        def is_stopped() -> bool:
            return bool(self.signals.received)

        if self.learner.classifier is not None:
            from covpool.training.divided import predict_together

            outcome = predict_together(model, loader, self.processes, precision, is_stopped)
        else:
            forward = Forward(model, device=self.processes.device, precision=precision)
            outcome = predict(forward.run(loader, is_stopped), self.processes, is_stopped)
        if outcome is None:
            self._leave()
        predictions, bad = outcome
        self.bad.note(bad)
        return predictions, measure(predictions, len(images.classes))

    def _is_done(self) -> bool:
        done, best, patience = len(self.progress.history), self.best, self.recipe.validation.patience
        if best is None or patience is None or self.splits.val is None:
            return done >= self.epochs
        # The head alone may be at its best early, before the backbone trains.
        return done >= self.epochs or done - max(best["epoch"], self.recipe.schedule.head_epochs) >= patience

    def _train_epoch(self) -> None:
        """Train the rest of an epoch."""
        progress = self.progress
        self.model.train()
        self.journal.start_epoch()
        batches = self.loader.from_cursor(progress.cursor)
        for _ in range(progress.cursor % self.batches, self.batches):
            started = time.monotonic()
            batch = self._next(batches)
            outcome = self.learner.step(batch, progress.cursor)
            progress.cursor += 1
            if outcome.skipped:
                self._skip(batch, outcome.counts)
            else:
                progress.taken += 1
                progress.loss += outcome.loss
                progress.top1 += outcome.top1
            progress.seconds += time.monotonic() - started
            self.journal.step(progress.cursor, outcome, self.learner.lr)
            every = self.recipe.checkpoint.steps
            if every is not None and progress.cursor % every == 0 and progress.cursor % self.batches:
                self._save()
        self._save()

    def _next(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, once all processes have one.

        If one process has none, or got a signal, all of them stop here. None may start a step that the
        others do not take part in.
        """
        batch, failure = None, ""
        try:
            batch = next(batches)
        except (DataError, RuntimeError) as error:  # RuntimeError if a worker died
            failure = str(error)
        minutes = self.recipe.checkpoint.minutes
        is_due = minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        known = [
            bool(self.signals.received),
            bool(failure),
            bool(batch and batch.bad),
            is_due and self.processes.is_first,
        ]
        stopped, failed, bad, due = self.processes.sum_(torch.tensor(known, dtype=torch.int64)).tolist()
        if stopped:  # first, because the signal may also be why a process has no batch
            self._save()
            self._leave()
        if failed:
            sentences = self.processes.gather(failure)
            self.processes.fail(TrainingError(next(sentence for sentence in sentences if sentence)))
        assert batch is not None
        if bad:
            self.bad.note(image for images in self.processes.gather(list(batch.bad)) for image in images)
        if due:
            self._save()
        return batch

    def _end_epoch(self) -> None:
        """Validate, save the model if it is the best, and log the epoch."""
        progress = self.progress
        row: dict[str, Any] = {
            "epoch": len(progress.history) + 1,
            "step": progress.cursor,
            "train_loss": progress.loss / progress.taken if progress.taken else None,
            "train_top1": progress.top1 / progress.taken if progress.taken else None,
            "lr": self.learner.lr,
            "images_per_second": self.recipe.batch_size * self.batches / max(progress.seconds, 1e-9),
            "seconds": progress.seconds,
        }
        if self.splits.val is not None:
            row |= self.evaluate(self.splits.val)[1]
            del row["images"]
        progress.history.append(row)
        is_best = self.best is row
        if is_best:
            self._save_bundle(row)
        progress.loss, progress.top1, progress.taken, progress.seconds = 0.0, 0.0, 0, 0.0
        self.processes.by_first(self._write_epoch)
        self.journal.end_epoch(row, is_best)

    def _write_epoch(self) -> None:
        self.folder.write_metrics(self.progress.history)
        self._remove_old()

    def _save_bundle(self, row: dict[str, Any]) -> None:
        """Save the model of an epoch, with its metrics and the recipe."""
        metrics = {name: row[name] for name in row if name not in ("seconds", "images_per_second")}
        recipe = dataclasses.asdict(self.recipe)
        model = self.learner.best_weights
        save_together(model, self.folder.bundle, self.processes, metrics=metrics, recipe=recipe)

    def _skip(self, batch: Batch, counts: bool) -> None:
        """Log a batch that was skipped, and stop if there were too many."""
        ids = [i for ids in self.processes.gather(batch.ids.tolist()) for i in ids]
        names = [self.splits.train.name(i) for i in ids] if self.processes.is_first else []
        self.journal.event("skipped", step=self.progress.cursor, counts=counts, ids=ids, names=names)
        self.progress.skips += counts
        if self.progress.skips > self.recipe.loop.max_skips:
            sentence = (
                f"{self.progress.skips} steps had a loss or a gradient that is not finite, more than "
                f"--max-skips {self.recipe.loop.max_skips}. {self.folder.log} lists their images. Try a "
                "lower learning rate, gradient clipping or a warmup"
            )
            self.processes.fail(NotFiniteError(sentence))

    def _save(self) -> None:
        """Write a checkpoint."""
        self._saved_at = time.monotonic()
        if self.learner.classifier is None:
            self.processes.by_first(lambda: self._write_checkpoint(ALONE, None))
        else:  # every process writes its rows
            self._write_checkpoint(self.processes, self.learner.classifier.rows)

    def _write_checkpoint(self, processes: Processes, rows: range | None) -> None:
        checkpoint = to_checkpoint(self.learner, self.progress, self._origin)
        try:
            write_checkpoint(self.folder.checkpoints, checkpoint, processes, rows)
            processes.by_first(self._remove_old)
        except OSError as error:
            raise TrainingError(
                f"no checkpoint could be written to {self.folder.checkpoints}: {error.strerror or error}. "
                "The last checkpoint is unchanged: rerun the command to resume from it"
            ) from error

    def _remove_old(self) -> None:
        keep, best = self.recipe.checkpoint.keep, self.best
        remove_old_checkpoints(self.folder.checkpoints, keep, None if best is None else best["step"])

    def _resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        classifier = self.learner.classifier
        self._rows = None if classifier is None else classifier.rows
        checkpoint = shared_checkpoint(self.folder.checkpoints, self.processes, self._rows)
        if checkpoint is None:
            return
        self.processes.by_first(lambda: self._check_origin(checkpoint.state))
        self.progress = checkpoint.progress
        if self.best is not None and not self.processes.by_first(self._has_best_bundle):
            self._mend_bundle()
        load_learner(self.learner, checkpoint)
        # Of the last step, for the log, if the run was killed during validation.
        self.learner.schedule.set_rates(self.learner.optimizer, max(self.progress.cursor - 1, 0))

    def _describe_origin(self) -> dict[str, Any]:
        """Return what a checkpoint belongs to: the images, and the keys of the recipe."""
        resolved = flat(dataclasses.replace(self.recipe, model=self.model.config))
        recipe = plain_json("recipe", {key: value for key, value in resolved.items() if key not in FREE})
        return {"images": self.splits.fingerprints, "contents": self.splits.contents, "recipe": recipe}

    def _check_origin(self, state: Mapping[str, Any]) -> None:
        """Raise if a checkpoint belongs to other images or another recipe. Older ones have no recipe."""
        origin, path = self._origin, self.folder.path
        if state["images"] != origin["images"]:
            raise TrainingError(f"{path} was started with other images: use another --out")
        if state.get("contents", origin["contents"]) != origin["contents"]:
            raise TrainingError(
                f"the images have changed since {path} was started, under the same names: restore them, or "
                "use another --out"
            )
        if differing := differences(state.get("recipe", {}), origin["recipe"]):
            raise TrainingError(
                f"the last checkpoint in {self.folder.checkpoints} is of a run with {differing}: remove it, "
                "or use another --out"
            )

    def _has_best_bundle(self) -> bool:
        with contextlib.suppress(BundleError):
            return bool(self.best and read_card(self.folder.bundle).metrics.get("step") == self.best["step"])
        return False

    def _mend_bundle(self) -> None:
        """Save the model of the best epoch again: the bundle is of a later epoch that has been lost."""
        best = self.best
        assert best is not None
        try:
            checkpoint = shared_checkpoint(self.folder.checkpoints, self.processes, self._rows, best["step"])
        except (DamagedCheckpointError, ReportedByFirstError):
            return
        assert checkpoint is not None
        self.learner.best_weights.load_state_dict(
            checkpoint.part("model" if self.learner.ema is None else "ema")
        )
        self._save_bundle(best)

    def _leave(self) -> NoReturn:
        """End the run with the signal that some process got."""
        number = max(self.processes.gather(self.signals.received))
        raise Interrupted(number, f"stopped at step {self.progress.cursor}: rerun the command to resume")

    def _evaluation_loader(self, images: ImageSet) -> EvaluationLoader:
        return EvaluationLoader(
            images,
            evaluation_transform(self.preprocessing),
            batch_size=self.recipe.validation.batch_size,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            workers=self.recipe.data.workers,
        )
