"""Training with a divided classifier matches the dense one, also on other numbers of processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from covpool.data.loader import Batch
from covpool.errors import CovpoolError, UsageError
from covpool.models import load_model, read_card
from covpool.models.saving import save_together
from covpool.nn.divided import DividedLinear
from covpool.processes import Processes
from covpool.training.network import make_model
from covpool.training.recipe_files import read_recipe
from covpool.training.step import Learner, Objective
from tests.data.pictures import TINY10, needs_tiny10
from tests.nn.process_group import Group
from tests.training.recorded_run import launch
from tests.training.small import rows

# Without BatchNorm, whose statistics are per process.
PLAIN: dict[str, Any] = {"model.backbone": "test_vit", "model.dim": 8, "model.image_size": None}
CLASSES = [f"class {k}" for k in range(7)]


def make(changes: dict[str, Any], divided: bool) -> Learner:
    """Make a learner for the processes of this group, or for a single process."""
    loop = {"loop.divide_classes": divided, "batch_size": 12, "schedule.epochs": 2, "optimizer.name": "sgd"}
    recipe = read_recipe(None, {**PLAIN, **loop, "optimizer.lr": 0.01, **changes})
    world, rank = (dist.get_world_size(), dist.get_rank()) if divided else (1, 0)
    processes = Processes(rank, world, torch.device("cpu"))
    model = make_model(recipe, CLASSES, processes)
    classifier = model.head.classifier if divided else None
    objective = Objective(recipe.loss, torch.linspace(0.5, 1.5, len(CLASSES)), classifier)
    return Learner(model, recipe, processes, objective, batches=10)


def batch(learner: Learner, seed: int) -> Batch:
    """Return this process's share of a batch of 12 images."""
    generator = torch.Generator().manual_seed(seed)
    side = learner.model.pretrained_cfg["input_size"][1]
    images = torch.randn(12, 3, side, side, generator=generator)
    labels = torch.randint(len(CLASSES), (12,), generator=generator)
    ids = torch.arange(12).tensor_split(learner.processes.world_size)[learner.processes.rank]
    return Batch(images[ids], labels[ids], ids, ())


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    found = {f"model {name}": value for name, value in learner.model.state_dict().items()}
    if learner.ema is not None:
        found |= {f"ema {name}": value for name, value in learner.ema.module.state_dict().items()}
    return {name: value.clone() for name, value in found.items()}


def compare(changes: dict[str, Any]) -> list[float]:
    """Take four steps here and on one process. Return differences of norm, loss, accuracy and weights."""
    group, alone = make(changes, divided=True), make(changes, divided=False)
    own = group.classifier.rows
    found = [0.0, 0.0, 0.0]
    for step in range(4):
        mine, other = group.step(batch(group, step), step), alone.step(batch(alone, step), step)
        for place, name in enumerate(("gradient_norm", "loss", "top1")):
            found[place] = max(found[place], abs(getattr(mine, name) - getattr(other, name)))
    largest = 0.0
    others = weights(alone)
    for name, value in weights(group).items():
        other = others[name][own.start : own.stop] if "head.classifier" in name else others[name]
        largest = max(largest, float((value - other).abs().max()))
    return [*found, largest]


def skip(changes: dict[str, Any]) -> tuple[list[bool], bool, float]:
    """Give one process a bad gradient. Return who skipped, whether weights stayed, and the loss scale."""
    learner = make(changes, divided=True)
    learner.step(batch(learner, 0), 0)
    before = weights(learner)
    parameter = learner.classifier.weight
    handle = None
    if dist.get_rank() == 1:  # only in the gradient of its rows: the loss is finite everywhere
        handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    outcome = learner.step(batch(learner, 1), 1)
    if handle is not None:
        handle.remove()
    after = weights(learner)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    next_one = learner.step(batch(learner, 2), 2)
    return [outcome.skipped, next_one.skipped], unchanged, learner.scaler.get_scale()


def refused(changes: dict[str, Any]) -> str:
    try:
        make(changes, divided=True)
    except UsageError as error:
        return str(error)
    return ""


def saved_with_nan(folder: str, checked: bool) -> str:
    """Save weights with one NaN row, in the last process. Return the error if there is one."""
    learner = make({}, divided=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            learner.classifier.weight[0] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        if not checked:
            patch.setattr("covpool.models.saving.check_finite", lambda tensors: None)
        try:
            save_together(learner.model, Path(folder), learner.processes, metrics={}, recipe={})
        except CovpoolError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    made = Group(3)
    yield made
    made.close()


MANY = {
    "sgd": {"optimizer.name": "sgd", "optimizer.clip": 0.5},
    "adamw, smoothing, head first": {
        "optimizer.name": "adamw",
        "optimizer.clip": 1.0,
        "loss.label_smoothing": 0.1,
        "schedule.head_first": 0.5,
    },
    "an average, in parts": {"loop.ema": 0.9, "loop.accumulate": 3},
    "a frozen backbone, nothing else to train": {
        "weights.freeze": "backbone",
        "model.pool": "gap",
        "model.dim": None,
    },
    "low rank": {"model.rank": 5, "optimizer.clip": 0.1},
    "hidden layers": {"model.head": "mlp", "model.hidden": (9,), "model.normalize": "l2"},
}


@pytest.mark.parametrize("name", MANY)
def test_three_processes_learn_as_one_with_the_dense_classifier(group: Group, name: str) -> None:
    # Mixing is per process, so it is left to the tests of the loss.
    changes = {"loss.mixup": 0.0, "loss.cutmix": 0.0, **MANY[name]}
    for norm, loss, top1, weight in group.call(compare, changes):
        assert norm < 1e-4
        assert loss < 1e-5
        assert top1 < 1e-6
        assert weight < 2e-5


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_gradient_that_is_not_finite_in_one_process_is_skipped_by_all(group: Group, precision: str) -> None:
    found = group.call(skip, {"loop.precision": precision, "loop.ema": 0.9})
    assert [skipped for skipped, _, _ in found] == [[True, False]] * 3
    assert all(unchanged for _, unchanged, _ in found)
    assert len({scale for _, _, scale in found}) == 1


def test_nan_is_neither_saved_nor_loaded(group: Group, tmp_path: Path) -> None:
    for error in group.call(saved_with_nan, str(tmp_path / "checked"), True):
        assert "has NaN or infinite values: " in error
    assert not (tmp_path / "checked").exists()
    assert group.call(saved_with_nan, str(tmp_path / "forged"), False) == [""] * 3
    with pytest.raises(ValueError, match="has NaN or infinite values"):
        load_model(tmp_path / "forged")


def test_refusals(group: Group) -> None:
    assert "lamb needs the whole matrix" in group.call(refused, {"optimizer.name": "lamb"})[2]
    assert "one classifier only" in group.call(refused, {"model.join": "gap"})[2]


DATA: dict[str, Any] = {"data.path": str(TINY10), "data.limit": 40, "loop.divide_classes": True}


def folder(path: Path, name: str) -> Path:
    (path / name).mkdir(parents=True)
    return path / name


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run / "bundle").state_dict()


def files(run: Path, step: int) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints" / f"step-{step:08d}").glob("rows-*"))


@needs_tiny10
@pytest.mark.slow
def test_a_run_is_that_of_the_dense_classifier(tmp_path: Path) -> None:
    """Include everything that has state: BatchNorm, an average, dropout, mixup, cutmix, class weights."""
    recipe = {**DATA, "data.balance": "weights", "loss.label_smoothing": 0.1, "optimizer.clip": 1.0}
    for name, divided in (("dense", False), ("divided", True)):
        changes = {**recipe, "loop.divide_classes": divided, "out": str(tmp_path / name)}
        assert launch(2, folder(tmp_path, f"record-{name}"), {"recipe": changes}) == [0, 0]
    dense, divided = final(tmp_path / "dense"), final(tmp_path / "divided")
    for name, value in dense.items():
        torch.testing.assert_close(divided[name], value, rtol=1e-3, atol=1e-4)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("dense", "divided")]
    assert summaries[0]["parameters"] == summaries[1]["parameters"]
    assert summaries[1]["metrics"]["loss"] == pytest.approx(summaries[0]["metrics"]["loss"], abs=1e-4)
    assert summaries[1]["metrics"]["top1"] == summaries[0]["metrics"]["top1"]


@pytest.mark.slow
@needs_tiny10
def test_stopped_on_four_processes_it_resumes_on_two_and_three(tmp_path: Path) -> None:
    # 10 classes: 3, 3, 2 and 2 rows, then 5 and 5, then 4, 3 and 3. An epoch has 4 steps.
    recipe = {**DATA, **PLAIN, "model.drop_rate": 0.0, "loss.mixup": 0.0, "loss.cutmix": 0.0}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert launch(1, folder(tmp_path, "record"), {"recipe": {**recipe, "out": str(whole)}}) == [0]
    parts = {**recipe, "out": str(run)}
    assert launch(4, folder(tmp_path, "four"), {"recipe": parts, "sigterm": [3, 2]}) == [143] * 4
    shares = (0, 3), (3, 6), (6, 8), (8, 10)
    assert files(run, 3) == [f"rows-{first:09d}-{last:09d}.safetensors" for first, last in shares]
    # A process is killed after the checkpoint of the first epoch. One of its files is truncated as well.
    codes = launch(2, folder(tmp_path, "two"), {"recipe": parts, "sigkill": [1, 5]})
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)
    torn = run / "checkpoints" / "step-00000004" / files(run, 4)[1]
    torn.write_bytes(torn.read_bytes()[:-7])
    assert launch(3, folder(tmp_path, "three"), {"recipe": parts}) == [0] * 3
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "resumed"] == [3, 3]
    # Only the order of the sums differs.
    expected, found = final(whole), final(run)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@needs_tiny10
def test_the_bundle_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    recipe = {**DATA, "out": str(run), "schedule.epochs": 1}
    assert launch(2, folder(tmp_path, "record"), {"recipe": recipe}) == [0] * 2
    bundle = run / "bundle"
    index = json.loads((bundle / "model.safetensors.index.json").read_text())
    names = {path.name for path in bundle.glob("*.safetensors")}
    assert (
        names
        == {f"model-{k:05d}-of-00003.safetensors" for k in range(1, 4)}
        == set(index["weight_map"].values())
    )
    for tensor, name in index["weight_map"].items():  # as the readers of such an index expect
        assert tensor in load_file(bundle / name)
    assert read_card(bundle).config.num_classes == 10
    model = load_model(bundle)
    assert model.head.classifier.weight.shape == (10, 36)
    assert not isinstance(model.head.classifier, DividedLinear)

    # The predictions of the run are those of the complete model.
    for row in rows(run / "predictions.csv")[:8]:
        (path,) = (TINY10 / "val").rglob(Path(row["name"]).name)
        (prediction,) = model.predict(path, top=1)
        assert prediction.name == row["predicted"]
        assert prediction.probability == pytest.approx(float(row["confidence"]), abs=1e-4)
    # A model whose classifier stays on the disk gives the same results.
    in_memory = load_model(bundle)
    images = torch.randn(4, *in_memory.pretrained_cfg["input_size"])
    monkeypatch.setattr("covpool.models.divided.available_bytes", lambda: 1000)
    streamed = load_model(bundle)
    assert type(streamed.head.classifier).__name__ == "StreamedLinear"
    assert streamed.num_classes == 10
    torch.testing.assert_close(streamed(images), in_memory(images))
    assert streamed.predict(str(next((TINY10 / "val").rglob("*.*"))), top=2)
    # Damaged and missing files are refused.
    file = bundle / "model-00003-of-00003.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model-00003-of-00003.safetensors is damaged"):
        load_model(bundle)
    file.unlink()
    with pytest.raises(ValueError, match=r"there is no model-00003-of-00003.safetensors"):
        load_model(bundle)
