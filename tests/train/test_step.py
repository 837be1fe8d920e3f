from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from covpool.data.batch import Batch
from covpool.train.network import make_model
from covpool.train.objective import Objective
from covpool.train.processes import Processes
from covpool.train.recipe_files import read_recipe
from covpool.train.step import Learner

ALONE = Processes(0, 1, torch.device("cpu"))
# Without BatchNorm, whose statistics would tell the parts of a batch apart.
PLAIN = {"model.backbone": "test_vit", "model.image_size": None}


def make(changes: dict[str, Any], seed: int = 0) -> Learner:
    recipe = read_recipe(
        None,
        {
            "model.backbone": "test_resnet",
            "model.dim": 8,
            "model.image_size": 64,
            "loss.mixup": 0.0,
            "batch_size": 6,
            "schedule.epochs": 2,
            "optimizer.name": "sgd",
            "optimizer.clip": None,
            "seed": seed,
            **changes,
        },
    )
    model = make_model(recipe, ["a", "b", "c"], ALONE)
    return Learner(model, recipe, ALONE, Objective(recipe.loss, 3), batches=10)


def batch(learner: Learner, seed: int, n: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    side = learner.model.pretrained_cfg["input_size"][1]
    images = torch.randn(n, 3, side, side, generator=generator)
    return Batch(images, torch.randint(3, (n,), generator=generator), torch.arange(n), ())


def state(learner: Learner) -> dict[str, Tensor]:
    """All that a step can change."""
    found = {f"model {name}": tensor.clone() for name, tensor in learner.model.state_dict().items()}
    assert learner.ema is not None
    found |= {f"ema {name}": tensor.clone() for name, tensor in learner.ema.module.state_dict().items()}
    for i, kept in enumerate(learner.optimizer.state.values()):
        found |= {f"{i} {name}": value.clone() for name, value in kept.items() if isinstance(value, Tensor)}
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer: str, bad: str) -> None:
    learner = make({"optimizer.name": optimizer})
    learner.step(batch(learner, 0), 0)
    before = state(learner)
    spoilt = batch(learner, 1)
    spoilt.images[3, 0, 5, 5] = float(bad)
    outcome = learner.step(spoilt, 1)
    assert outcome.skipped
    assert outcome.counts
    after = state(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)
    # And the next step is as if it had never been.
    other = copy.deepcopy(make({"optimizer.name": optimizer}))
    other.step(batch(other, 0), 0)
    assert learner.step(batch(learner, 2), 2) == other.step(batch(other, 2), 2)
    mine, others = state(learner), state(other)
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)
    assert any(not torch.equal(mine[name], before[name]) for name in mine)


def test_a_step_is_what_torch_does() -> None:
    """Against the equations of SGD with momentum, on two steps."""
    learner = make(
        {
            **PLAIN,
            "optimizer.momentum": 0.9,
            "optimizer.weight_decay": 0.01,
            "schedule.kind": "constant",
            "schedule.warmup": 0,
        }
    )
    model = copy.deepcopy(learner.model)
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    for cursor in range(2):
        given = batch(learner, cursor)
        outcome = learner.step(given, cursor)
        loss = torch.nn.functional.cross_entropy(model(given.images), given.labels, label_smoothing=0.1)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        assert outcome.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
        decays = [p.ndim > 1 for p in model.parameters()]
        with torch.no_grad():
            for p, g, m, decay in zip(model.parameters(), gradients, momentum, decays, strict=True):
                m.mul_(0.9).add_(g + (0.01 * p if decay else 0))
                p.sub_(learner.recipe.optimizer.lr * m)
    exempt = model.no_weight_decay()
    for (name, mine), theirs in zip(learner.model.named_parameters(), model.parameters(), strict=True):
        if name not in exempt:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("parts", [4, 9])
def test_in_parts_a_step_is_the_same(parts: int) -> None:
    whole, divided = make(PLAIN), make({**PLAIN, "loop.accumulate": parts})
    first, second = whole.step(batch(whole, 0), 0), divided.step(batch(divided, 0), 0)
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.top1 == pytest.approx(second.top1)
    for mine, theirs in zip(whole.model.parameters(), divided.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_clipping_bounds_the_step() -> None:
    plain = {**PLAIN, "optimizer.weight_decay": 0.0, "optimizer.lr": 1.0}
    free, clipped = make(plain), make({**plain, "optimizer.clip": 0.1})
    before = [p.detach().clone() for p in clipped.model.parameters()]
    assert (
        clipped.step(batch(clipped, 0), 5).gradient_norm == free.step(batch(free, 0), 5).gradient_norm > 0.1
    )
    moved = [a - b for a, b in zip(clipped.model.parameters(), before, strict=True)]
    size = torch.stack([m.norm() for m in moved]).norm().item()
    assert size == pytest.approx(0.1 * clipped.lr, rel=1e-3)


def test_dropout_depends_on_the_cursor_and_nothing_before() -> None:
    losses = []
    for noise in (0, 3):
        learner = make({**PLAIN, "model.drop_rate": 0.5})
        torch.rand(noise)
        losses.append([learner.step(batch(learner, 7), cursor).loss for cursor in (4, 4, 5)])
    assert losses[0] == losses[1]


@pytest.mark.slow  # convolutions in float16 are, on a CPU
def test_half_precision_scales_its_loss_and_skips_overflow() -> None:
    learner = make({"loop.precision": "float16"})
    learner.scaler = torch.GradScaler("cpu", init_scale=2.0**26)
    scale, outcomes = learner.scaler.get_scale(), [learner.step(batch(learner, i), i) for i in range(12)]
    assert outcomes[0].skipped
    assert not outcomes[0].counts  # the next scale is lower: nothing is wrong
    assert not outcomes[-1].skipped
    assert learner.scaler.get_scale() < scale


def test_rates_of_layers_keep_their_ratio() -> None:
    learner = make({**PLAIN, "optimizer.layer_decay": 0.5, "schedule.warmup": 0.5, "schedule.final_lr": 1e-4})
    first = [group["lr"] for group in learner.optimizer.param_groups]
    assert max(first) > 8 * min(first)
    for cursor in (0, 3, 5, 12, 19):
        learner.step(batch(learner, cursor), cursor)
        rates = [group["lr"] for group in learner.optimizer.param_groups]
        factor = learner.schedule.factor(cursor)
        assert rates == pytest.approx([factor * rate for rate in first])
        assert learner.lr == pytest.approx(factor * learner.recipe.optimizer.lr)


def test_the_head_learns_alone_and_then_all() -> None:
    learner = make({"schedule.head_first": 0.5, "optimizer.weight_decay": 0.1, "loop.ema": None})
    stages = []
    for cursor in (0, 9, 10, 19):
        before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
        learner.step(batch(learner, cursor), cursor)
        after = learner.model.state_dict()
        changed = (name for name in after if not torch.equal(before[name], after[name]))
        stages.append({name.partition(".")[0] for name in changed})
    assert stages[:2] == [{"pool", "head"}] * 2
    assert stages[2:] == [{"backbone", "pool", "head"}] * 2


def test_a_frozen_backbone_stays_frozen() -> None:
    learner = make({"schedule.head_first": 0.5, "weights.freeze": "backbone"})
    assert learner.schedule.head_steps == 20  # one cycle, not two
    before = {name: tensor.clone() for name, tensor in learner.model.backbone.state_dict().items()}
    for cursor in (0, 15):
        learner.step(batch(learner, cursor), cursor)
    after = learner.model.backbone.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_statistics_are_kept_and_weights_learn() -> None:
    learner = make({})
    learner.model.keep_statistics = True
    learner.model.train()
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    learner.step(batch(learner, 0), 0)
    after = learner.model.state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert not any(name.startswith("backbone") and "running" in name for name in changed)
    learned = {"backbone.conv1.0.weight", "backbone.conv1.1.weight", "pool.reduction.norm.running_mean"}
    assert learned <= changed
