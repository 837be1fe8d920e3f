"""Complete training runs in this process."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import covpool
from covpool.data.sources import open_images
from covpool.errors import CovpoolError, Interrupted
from covpool.training.recipe_files import read_recipe
from covpool.training.run import _opened, compare
from tests.data.pictures import SPARROWS, TINY10, needs_sparrows, needs_tiny10
from tests.evaluate.test_lock import hold
from tests.training.small import SMALL, rows, train


@needs_tiny10
@pytest.mark.usefixtures("_no_figures")
def test_a_run_leaves_a_folder_that_explains_itself(tmp_path: Path) -> None:
    run = train(tmp_path / "run", {"trackers": ["tensorboard"], "data.limit": 60})
    assert {path.name for path in run.folder.iterdir()} == {
        ".covpool-lock",
        "bundle",
        "checkpoints",
        "confusion.png",
        "curves.png",
        "log.jsonl",
        "metrics.csv",
        "per_class.csv",
        "predictions.csv",
        "recipe.yaml",
        "report.html",
        "summary.json",
        "tensorboard",
        "worst.png",
    }
    assert json.loads((run.folder / "summary.json").read_bytes()) == {**run.summary, "finished": True}
    assert run.summary["images"] == {"train": 60, "val": 60}
    assert len(rows(run.folder / "metrics.csv")) == 2
    assert not run.was_finished
    again = train(tmp_path / "run", {"trackers": ["tensorboard"], "data.limit": 60})
    assert again.was_finished
    assert again.summary["metrics"] == run.summary["metrics"]


@pytest.mark.slow
@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_the_numbers_are_those_of_the_bundle(tmp_path: Path) -> None:
    from covpool.data.decode import decode
    from covpool.data.transforms import Preprocessing, evaluation_transform

    run = train(tmp_path / "run")
    model = covpool.load_model(run.folder / "bundle").eval()
    images = open_images(TINY10, "val")
    assert model.classes == images.classes
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    by_name = {images.name(i): i for i in range(len(images))}
    found = rows(run.folder / "predictions.csv")
    assert len(found) == 40
    right = 0
    for row in found:
        i = by_name[row["name"]]
        with torch.inference_mode():
            scores = model(transform(decode(images.read(i)))[None]).softmax(dim=1)[0]
        assert images.classes[images.labels[i]] == row["label"]
        assert images.classes[int(scores.argmax())] == row["predicted"]
        assert float(row["confidence"]) == pytest.approx(scores.max().item(), abs=1e-5)
        right += row["label"] == row["predicted"]
    assert run.summary["metrics"]["top1"] == right / 40


@pytest.mark.slow
@needs_sparrows
@pytest.mark.usefixtures("_no_report")
def test_the_test_split_is_for_the_end_and_val_is_set_aside(tmp_path: Path) -> None:
    changes = {"data.path": str(SPARROWS), "data.limit": 63, "validation.refit": True, "schedule.epochs": 1}
    run = train(tmp_path / "run", changes)
    assert run.summary["images"] == {"train": 63, "val": 63, "test": 63}
    assert run.summary["split"] == "test"
    names = {row["name"] for row in rows(run.folder / "predictions.csv")}
    assert all(name.startswith("test/") for name in names)
    # The model comes from the second training run, on train and val together.
    bundle = covpool.load_model(run.folder / "bundle").state_dict()
    refit = covpool.load_model(run.folder / "refit" / "bundle").state_dict()
    assert all(torch.equal(bundle[name], refit[name]) for name in refit)
    log = [json.loads(line) for line in (run.folder / "refit" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 126 // 8


@pytest.mark.slow
@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_another_recipe_does_not_go_on_with_a_run(tmp_path: Path) -> None:
    train(tmp_path / "run", {"schedule.epochs": 1})
    changes = {"schedule.epochs": 2, "optimizer.lr": 0.1}
    with pytest.raises(ValueError, match=r"was started with --lr 0.0005, not 0.1; --epochs 1, not 2: use"):
        train(tmp_path / "run", changes)
    path = tmp_path / "others"
    shutil.copytree(TINY10, path, ignore=lambda folder, names: names[60:])
    with pytest.raises(ValueError, match="is a run on other images"):
        train(tmp_path / "run", {"schedule.epochs": 1, "data.path": str(path)})
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match="was started with other images"):
        train(tmp_path / "run", {"schedule.epochs": 1, "data.path": str(path)})
    # The width was given before and is left open now.
    changes = {"schedule.epochs": 1, "data.max_bad": 7, "model.dim": "auto"}
    assert train(tmp_path / "run", changes).summary["dim"] == 8


@needs_tiny10
@pytest.mark.parametrize(
    "changes",
    [
        {"data.balance": "sampling", "loop.accumulate": 3},
        {"data.val_fraction": 0, "data.path": str(TINY10 / "train")},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"loop.precision": "bfloat16", "loop.channels_last": True},
                {"model.pool": "gap"},
                {"data.balance": "weights"},
                {"optimizer.name": "sgd", "schedule.kind": "exponential"},
            )
        ),
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
@pytest.mark.usefixtures("_no_report")
def test_options_of_a_recipe_train(tmp_path: Path, changes: dict[str, Any]) -> None:
    summary = train(tmp_path / "run", {"schedule.epochs": 1, **changes}).summary
    assert summary["epochs"] == 1
    assert (summary["metrics"] is None) == ("data.val_fraction" in changes)


@pytest.mark.slow
@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_it_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    # Nothing is learned at this learning rate, so the best epoch is an early one.
    changes = {"optimizer.lr": 1e-12, "schedule.epochs": 9, "validation.patience": 2, "loop.ema": None}
    changes |= {"schedule.final_lr": 1e-13, "schedule.warmup": 0, "optimizer.momentum": 0}
    summary = train(tmp_path / "run", changes).summary
    top1 = [float(row["top1"]) for row in rows(tmp_path / "run" / "metrics.csv")]
    assert summary["best_epoch"] == 1 + top1.index(max(top1))
    assert summary["epochs"] - summary["best_epoch"] == 2
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert f"step-{5 * summary['best_epoch']:08d}" in steps


@pytest.mark.slow
@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_it_waits_for_the_backbone_to_learn(tmp_path: Path) -> None:
    changes = {"optimizer.lr": 1e-12, "schedule.epochs": 8, "validation.patience": 2, "loop.ema": None}
    changes |= {"schedule.final_lr": 1e-13, "schedule.warmup": 0, "schedule.head_first": 0.5}
    summary = train(tmp_path / "run", changes).summary
    assert summary["epochs"] == max(summary["best_epoch"], 4) + 2


@needs_tiny10
def test_statistics_come_with_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BatchNorms can only keep statistics that come with weights"):
        train(tmp_path / "run", {"weights.keep_statistics": True})


@pytest.mark.slow
@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_a_bundle_is_where_another_run_begins(tmp_path: Path) -> None:
    first = train(tmp_path / "first", {"schedule.epochs": 1})
    frozen = {"weights.bundle": str(first.folder / "bundle"), "weights.freeze": "backbone"}
    second = train(tmp_path / "second", {"schedule.epochs": 1, **frozen})
    before, after = (covpool.load_model(run.folder / "bundle").state_dict() for run in (first, second))
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("backbone."))
    assert not torch.equal(before["head.classifier.weight"], after["head.classifier.weight"])
    for changes, sentence in (
        ({"model.dim": 16}, "dim 8, not 16"),
        ({"model.pool": "cov"}, "pool isqrt_cov, not cov"),
        ({"model.keep_resolution": False}, "keep_resolution True, not False"),
        ({"model.preprocessing": {"mean": [0.1, 0.1, 0.1]}}, r"preprocessing's mean \(0.5, 0.5, 0.5\), not"),
        ({"model.head": "mlp"}, "they differ in"),
    ):
        with pytest.raises(ValueError, match=f"is not of the recipe's network: .*{sentence}"):
            train(tmp_path / "third", {**frozen, **changes})


@needs_tiny10
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"batch_size": 64},
            r"--batch-size 64 is larger than the training set \(40 images\): use",
        ),
        ({"validation.refit": True}, "--validation.refit needs validation images and test images"),
        ({"data.path": "nowhere"}, "nowhere"),
        ({"model.backbone": "resnet5O"}, "resnet5O"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ValueError, OSError), match=sentence):
        train(tmp_path / "run", changes)
    assert not (tmp_path / "run").exists()


@needs_tiny10
def test_a_run_does_not_go_among_its_images(tmp_path: Path) -> None:
    shutil.copytree(TINY10 / "val", tmp_path / "data")
    with pytest.raises(ValueError, match="files of the run would go into the images themselves"):
        train(tmp_path / "data" / "run", {"data.path": str(tmp_path / "data")})
    assert not (tmp_path / "data" / "run").exists()


@needs_tiny10
def test_a_signal_after_the_last_step_begins_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_report(folder: Path, images: Any, model: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("covpool.training.report.write_report", write_report)
    recipe = read_recipe(None, {**SMALL, "out": str(tmp_path), "schedule.epochs": 1})
    with pytest.raises(Interrupted, match="was finished") as stopped:
        compare(recipe, "gap")
    assert stopped.value.exit_code == 143
    assert (tmp_path / "isqrt_cov" / "summary.json").exists()
    assert not (tmp_path / "gap").exists()


@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_a_tracker_that_cannot_be_closed_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        def add(self, values: Any, step: int) -> None:
            pass

        def close(self) -> None:
            raise ConnectionError("the server is gone")

    monkeypatch.setattr("covpool.training.journal.make_trackers", lambda *arguments: [Gone()])
    assert train(tmp_path / "run", {"schedule.epochs": 1}).summary["epochs"] == 1
    assert "Gone failed: the server is gone" in caplog.text


@needs_tiny10
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schedule.kind": "steps", "schedule.milestones": [3]}, "the learning rate never falls"),
        ({"schedule.head_first": 0.5}, "new layers train alone for 12 steps only"),
        ({"schedule.head_first": 0.5, "data.limit": 400}, ""),
        ({"schedule.head_first": 0.5, "model.pool": "gap"}, ""),
        ({"weights.pretrained": False}, "training from scratch on"),
        ({"data.limit": 20}, "its 95 % interval is up to ±"),
        ({}, ""),
    ],
)
def test_what_will_hardly_do_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], sentence: str
) -> None:
    with caplog.at_level(logging.WARNING, "covpool"):
        quiet = {"weights.pretrained": True, "data.limit": 100}
        _opened(read_recipe("modern", {**SMALL, **quiet, "out": str(tmp_path / "run"), **changes}))
    assert caplog.text.count("WARNING") == bool(sentence)
    assert sentence in caplog.text


@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_after_a_damaged_checkpoint_the_bundle_is_that_of_the_best_epoch_there_is(tmp_path: Path) -> None:
    run = train(tmp_path / "run", {"schedule.epochs": 3, "checkpoint.keep": 9})
    checkpoints = run.folder / "checkpoints"
    (run.folder / "summary.json").unlink()
    for step in (10, 15):
        (checkpoints / f"step-{step:08d}" / "model.safetensors").write_bytes(b"damaged")
    again = train(tmp_path / "run", {"schedule.epochs": 3, "checkpoint.keep": 1})
    assert again.summary["metrics"] == run.summary["metrics"]
    names = {path.name for path in checkpoints.iterdir()}
    assert {"damaged-step-00000010", "damaged-step-00000015", "step-00000015"} <= names


@needs_tiny10
@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("fails", [False, True])
def test_the_random_state_and_the_modes_of_the_caller_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.manual_seed(5)
    before, others = torch.get_rng_state(), random.getstate()
    changes = {"schedule.epochs": 1, "loop.deterministic": True, "data.limit": 16}
    if fails:
        monkeypatch.setattr("covpool.training.run.Trainer.run", lambda trainer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tmp_path / "run", changes)
    else:
        train(tmp_path / "run", changes)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == others
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    other = context.Process(target=hold, args=(tmp_path / "run", is_held))
    other.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(CovpoolError, match=r"another process is writing into .*run"):
            train(tmp_path / "run", {"schedule.epochs": 1})
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".covpool-lock"]
    finally:
        other.kill()  # SIGKILL: the lock file stays, the lock does not
        other.join()
    assert train(tmp_path / "run", {"schedule.epochs": 1, "data.limit": 16}).summary["epochs"] == 1
