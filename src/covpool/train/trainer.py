"""The loop: epoch after epoch, step after step, and what a kill, a bad image or a NaN must not spoil."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from covpool.data.batch import Batch
from covpool.data.image_set import ImageSet
from covpool.data.loader import EvaluationLoader
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.errors import (
    BundleError,
    DamagedCheckpointError,
    DataError,
    Interrupted,
    NotFiniteError,
    TrainingError,
)
from covpool.inference.forward import Forward
from covpool.models.bundle import check_savable, read_card, save_model
from covpool.processes import Processes, Signals
from covpool.train.checkpoint import (
    Progress,
    checkpoint_path,
    from_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
    shared_checkpoint,
    to_checkpoint,
    write_checkpoint,
)
from covpool.train.journal import Journal
from covpool.train.metrics import Metrics, Predictions, measure, predict
from covpool.train.network import make_model
from covpool.train.recipe import Recipe
from covpool.train.run_folder import BadImages, RunFolder
from covpool.train.splits import Splits, make_loader
from covpool.train.step import Learner, make_objective


class Trainer:
    """Trains a recipe's network on a set, and keeps the best by another.

    Args:
        recipe: of the run.
        processes: that train together.
        signals: that ask to stop.
        splits: the images to learn from, and those to choose the best epoch by; without any, it is the last.
        folder: for the files.
        bad: the images that could not be used, to which it adds.
        epochs: after which to stop, if before the schedule's end.
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
        objective = make_objective(recipe, splits.train, processes.device)
        self.learner = Learner(self.model, recipe, processes, objective, self.batches)
        self.progress = self._resume()
        self.journal = Journal(recipe, processes, folder, self.progress.cursor, self.batches, self.epochs)
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Train to the end, from wherever a run before this one came to."""
        with self.journal:
            self.journal.begin(self.model, len(self.splits.train))
            while not self._is_done():
                if self.progress.cursor == self.batches * (len(self.progress.history) + 1):
                    self._end_epoch()
                else:
                    self._train_epoch()

    def evaluate(self, images: ImageSet) -> tuple[Predictions, Metrics]:
        """The predictions of the best weights, in every process, and what they come to."""
        model = self.learner.best_weights
        self.processes.broadcast_buffers(model)
        loader = self._val_loader if images is self.splits.val else None
        forward = Forward(model, device=self.processes.device, precision=self.recipe.loop.precision)

        def is_stopped() -> bool:
            return bool(self.signals.received)

        results = forward.run(loader or self._evaluation_loader(images), is_stopped)
        found = predict(results, self.processes, is_stopped)
        if found is None:
            self._leave()
        predictions, bad = found
        self.bad.note(bad)
        return predictions, measure(predictions, len(images.classes))

    def _is_done(self) -> bool:
        done, best = self.progress.history, self.progress.best
        patience = self.recipe.validation.patience
        # The head alone may be at its best early on, and the backbone has yet to learn.
        since = 0 if best is None else max(best["epoch"], self.recipe.schedule.head_epochs)
        waited = best is not None and patience is not None and len(done) - since >= patience
        return len(done) >= self.epochs or (self.splits.val is not None and waited)

    def _train_epoch(self) -> None:
        """The rest of an epoch."""
        progress = self.progress
        epoch, done = divmod(progress.cursor, self.batches)
        self.model.train()
        self.journal.start_epoch(epoch, done)
        batches = self.loader.from_cursor(progress.cursor)
        for _ in range(done, self.batches):
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
        """The next batch, once all processes have one; or the end, if one has none or was asked to stop.

        Whatever only one process knows is told to the others here, before any of them begins a step that the
        others would not take part in.
        """
        batch, failure = None, ""
        try:
            batch = next(batches)
        except (DataError, RuntimeError) as error:  # the second if a worker died
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
            self._fail(next(sentence for sentence in self.processes.gather(failure) if sentence))
        assert batch is not None
        if bad:
            self.bad.note(image for images in self.processes.gather(list(batch.bad)) for image in images)
        if due:
            self._save()
        return batch

    def _end_epoch(self) -> None:
        """Validate, keep the model if it is the best, and write the row of the epoch."""
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
            row |= dataclasses.asdict(self.evaluate(self.splits.val)[1])
            del row["images"]
        monitor = self.recipe.validation.monitor
        is_best = self.splits.val is None or progress.best is None or row[monitor] > progress.best[monitor]
        if is_best:
            self.processes.by_first(lambda: self._save_bundle(row))
        progress.history.append(row)
        progress.best = row if is_best else progress.best
        progress.loss, progress.top1, progress.taken, progress.seconds = 0.0, 0.0, 0, 0.0
        self.processes.by_first(self._write_epoch)
        self.journal.end_epoch(progress.history, is_best)

    def _write_epoch(self) -> None:
        self.folder.write_metrics(self.progress.history)
        self._remove_old()

    def _save_bundle(self, row: dict[str, Any]) -> None:
        """The model of an epoch, with what it came to and how it was made."""
        metrics = {name: row[name] for name in row if name not in ("seconds", "images_per_second")}
        recipe = dataclasses.asdict(self.recipe)
        save_model(self.learner.best_weights, self.folder.bundle, metrics=metrics, recipe=recipe)

    def _skip(self, batch: Batch, counts: bool) -> None:
        """Write down a batch that was skipped; stop where there were too many."""
        ids = [i for ids in self.processes.gather(batch.ids.tolist()) for i in ids]
        names = [self.splits.train.name(i) for i in ids] if self.processes.is_first else []
        self.journal.event("skipped", step=self.progress.cursor, counts=counts, ids=ids, names=names)
        self.progress.skips += counts
        if self.progress.skips > self.recipe.loop.max_skips:
            sentence = (
                f"{self.progress.skips} steps had a loss or a gradient that is not finite, more than "
                f"--max-skips {self.recipe.loop.max_skips}: {self.folder.log} lists their images; a lower "
                "learning rate, clipping or a warm-up may help"
            )
            self.processes.fail(NotFiniteError(sentence))

    def _save(self) -> None:
        """Write a checkpoint."""
        self._saved_at = time.monotonic()
        self.processes.by_first(self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        checkpoint = to_checkpoint(self.learner, self.progress, self.splits.fingerprints)
        try:
            write_checkpoint(self.folder.checkpoints, checkpoint)
            self._remove_old()
        except OSError as error:
            raise TrainingError(
                f"no checkpoint could be written to {self.folder.checkpoints}: {error.strerror or error}; "
                "the last one is as it was, and the same command goes on from there"
            ) from error

    def _remove_old(self) -> None:
        best = self.progress.best
        keep = self.recipe.checkpoint.keep
        remove_old_checkpoints(self.folder.checkpoints, keep, None if best is None else best["step"])

    def _resume(self) -> Progress:
        """Load the newest checkpoint, if there is one."""
        found = shared_checkpoint(self.folder.checkpoints, self.processes)
        if found is None:
            return Progress()
        if found.state["images"] != self.splits.fingerprints:
            self._fail(f"{self.folder.path} was begun with other images than these: give another --out")
        if (best := found.state["best"]) is not None:
            self.processes.by_first(lambda: self._mend_bundle(best))
        return from_checkpoint(self.learner, found)

    def _mend_bundle(self, best: dict[str, Any]) -> None:
        """Put back the model of the best epoch, where the bundle is of a later one that has been lost."""
        with contextlib.suppress(BundleError):
            if read_card(self.folder.bundle).metrics.get("step") == best["step"]:
                return
        try:
            tensors = read_checkpoint(checkpoint_path(self.folder.checkpoints, best["step"])).tensors
        except DamagedCheckpointError:
            return
        self.learner.best_weights.load_state_dict(tensors["model" if self.learner.ema is None else "ema"])
        self._save_bundle(best)

    def _leave(self) -> NoReturn:
        """End the run with the signal that some process got."""
        number = max(self.processes.gather(self.signals.received))
        raise Interrupted(
            number, f"stopped at step {self.progress.cursor}; the same command goes on from there"
        )

    def _fail(self, sentence: str) -> NoReturn:
        self.processes.fail(TrainingError(sentence))

    def _evaluation_loader(self, images: ImageSet) -> EvaluationLoader:
        return EvaluationLoader(
            images,
            evaluation_transform(self.preprocessing),
            batch_size=self.recipe.validation.batch_size,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            workers=self.recipe.data.workers,
        )
