"""A training step: optimizer, schedule, skipped steps, accumulation."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from covpool.data.loader import Batch
from covpool.errors import UsageError
from covpool.nn.divided import DividedLinear
from covpool.processes import Processes
from covpool.training.network import Schedule, load_optimizer_tensors, make_model, optimizer_tensors
from covpool.training.recipe import LossOptions, ScheduleOptions
from covpool.training.recipe_files import read_recipe
from covpool.training.step import Learner, Objective

BATCHES = 10


def factors(steps: tuple[int, ...], lr: float = 0.1, **options: Any) -> list[float]:
    schedule = Schedule(ScheduleOptions(**options), lr, BATCHES)
    return [schedule.factor(step) for step in steps]


def test_a_milestone_begins_its_epoch() -> None:
    found = factors((0, 9, 10, 14, 15, 19), epochs=2, kind="steps", milestones=(1, 1.5))
    assert found == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_exponential_ends_at_the_final_rate() -> None:
    # The paper's AlexNet: from 10^-1.1 to 10^-5 over 20 epochs.
    found = factors((0, 100, 200), lr=10**-1.1, epochs=20, kind="exponential", final_lr=1e-5)
    assert [10**-1.1 * factor for factor in found] == pytest.approx([10**-1.1, 10**-3.05, 1e-5])


def test_cosine_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=1e-3)
    for step in range(31):
        (factor,) = factors((step,), epochs=3, kind="cosine", final_lr=1e-3)
        assert 0.1 * factor == pytest.approx(oracle.get_last_lr()[0])
        optimizer.step()
        oracle.step()


def test_a_warm_up_begins_low_and_ends_at_the_rate() -> None:
    found = factors(tuple(range(6)), epochs=2, kind="constant", warmup=0.4)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


def test_every_group_keeps_its_ratio() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[0], "lr": 0.5}, {"params": parameters[1], "lr": 0.1}])
    schedule = Schedule(ScheduleOptions(epochs=2, kind="cosine"), 0.1, BATCHES)
    for step in (3, 0, 15):
        schedule.set_rates(optimizer, step)
        factor = schedule.factor(step)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.5 * factor, 0.1 * factor])


def test_the_head_alone_has_a_cycle_and_what_follows_is_as_from_the_start() -> None:
    options: dict[str, Any] = {"kind": "cosine", "final_lr": 1e-3, "warmup": 0.5}
    found = factors(tuple(range(50)), epochs=5, head_first=0.4, head_lr=1.0, **options)
    head, rest = found[:20], found[20:]
    assert rest == pytest.approx(factors(tuple(range(30)), epochs=3, **options))
    assert max(head) == pytest.approx(10, rel=0.01)  # ten times the learning rate that follows
    assert head.index(max(head)) == 6
    assert head[0] < 2
    assert head[-1] < 0.2


def test_a_warm_up_fits_the_epochs_after_the_head() -> None:
    with pytest.raises(ValueError, match="below the epochs after those of the head; got 5"):
        ScheduleOptions(epochs=10, head_first=0.6, warmup=5)
    assert ScheduleOptions(epochs=100, head_first=0.29).head_epochs == 29


@pytest.mark.parametrize(("epochs", "of_head"), [(1, 0), (2, 1), (5, 2), (30, 15)])
def test_the_share_of_the_head_is_in_whole_epochs(epochs: int, of_head: int) -> None:
    assert ScheduleOptions(epochs=epochs, head_first=0.5).head_epochs == of_head


ALONE = Processes(0, 1, torch.device("cpu"))
# Without BatchNorm, whose statistics depend on how a batch is divided.
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
            "optimizer.classifier_factor": 1,
            "optimizer.clip": None,
            "seed": seed,
            **changes,
        },
    )
    model = make_model(recipe, ["a", "b", "c"], ALONE)
    return Learner(model, recipe, ALONE, Objective(recipe.loss), batches=10)


def batch(learner: Learner, seed: int, n: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    side = learner.model.pretrained_cfg["input_size"][1]
    images = torch.randn(n, 3, side, side, generator=generator)
    return Batch(images, torch.randint(3, (n,), generator=generator), torch.arange(n), ())


def state(learner: Learner) -> dict[str, Tensor]:
    """Return everything that a step can change."""
    found = {f"model {name}": tensor.clone() for name, tensor in learner.model.state_dict().items()}
    assert learner.ema is not None
    found |= {f"ema {name}": tensor.clone() for name, tensor in learner.ema.module.state_dict().items()}
    for i, kept in enumerate(learner.optimizer.state.values()):
        found |= {f"{i} {name}": value.clone() for name, value in kept.items() if isinstance(value, Tensor)}
    return found


@pytest.mark.parametrize(("optimizer", "bad"), [("sgd", "nan"), ("adamw", "inf")])
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
    # The next step is as if the bad one had not happened.
    other = copy.deepcopy(make({"optimizer.name": optimizer}))
    other.step(batch(other, 0), 0)
    assert learner.step(batch(learner, 2), 2) == other.step(batch(other, 2), 2)
    mine, others = state(learner), state(other)
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)
    assert any(not torch.equal(mine[name], before[name]) for name in mine)


def test_a_step_is_what_torch_does() -> None:
    """Compare two steps with the equations of SGD with momentum."""
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
    learner = make({**PLAIN, "model.drop_rate": 0.5})
    assert learner.step(batch(learner, 7), 5).loss != losses[0][0]


@pytest.mark.slow  # float16 convolutions are slow on a CPU
def test_half_precision_scales_its_loss_and_skips_overflow() -> None:
    learner = make({"loop.precision": "float16"})
    learner.scaler = torch.GradScaler("cpu", init_scale=2.0**26)
    scale, outcomes = learner.scaler.get_scale(), [learner.step(batch(learner, i), i) for i in range(12)]
    assert outcomes[0].skipped
    assert not outcomes[0].counts  # the next scale is lower; this is not a fault
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


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_sgd_and_adamw_are_those_of_torch(name: str) -> None:
    mine, other = (make({"optimizer.name": name, "optimizer.momentum": 0.8}) for _ in range(2))
    groups = [
        {key: group[key] for key in ("params", "lr", "weight_decay")}
        for group in other.optimizer.param_groups
    ]
    other.optimizer = (
        torch.optim.SGD(groups, momentum=0.8)
        if name == "sgd"
        else torch.optim.AdamW(groups, betas=(0.8, 0.999))
    )
    for cursor in range(3):
        assert mine.step(batch(mine, cursor), cursor) == other.step(batch(other, cursor), cursor)
    one, two = state(mine), state(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# Optimizers with numbers in the state, in the groups, or as tensors; a scalar per layer; two momentums.
@pytest.mark.parametrize(
    "name",
    [
        *("sgd", "adamw", "lamb", "novograd"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lion", "adan", "mars", "nadam", "laprop")),
    ],
)
def test_the_state_of_an_optimizer_can_be_saved(name: str) -> None:
    mine, other = (make({"optimizer.name": name}) for _ in range(2))
    for cursor in range(2):
        mine.step(batch(mine, cursor), cursor)
    saved = {key: tensor.clone() for key, tensor in optimizer_tensors(mine.optimizer, mine.model).items()}
    other.model.load_state_dict(mine.model.state_dict())
    load_optimizer_tensors(other.optimizer, other.model, saved)
    for cursor in (2, 3):
        assert mine.step(batch(mine, cursor), cursor) == other.step(batch(other, cursor), cursor)
    weights, others = mine.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(weights[key], others[key]) for key in weights)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lamp", "--optimizer.name is 'lamp', which covpool does not support: use lamb"),
        ("adahessian", "'adahessian', which covpool does not support"),
        ("bnbadam", "--optimizer.name bnbadam is not available here"),
    ],
)
def test_an_unknown_optimizer_is_named(name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make({"optimizer.name": name})


@dataclasses.dataclass(frozen=True)
class MoreOptions(LossOptions):
    """A section ``loss`` with a new option."""

    focus: float = 0.0


def test_a_new_loss_option_is_not_ignored_by_a_divided_classifier() -> None:
    divided = DividedLinear(4, 3)
    Objective(MoreOptions(label_smoothing=0.1), None, divided)
    Objective(MoreOptions(focus=2.0))
    with pytest.raises(UsageError, match=r"loss.focus does not work with classes divided over processes"):
        Objective(MoreOptions(focus=2.0), None, divided)
