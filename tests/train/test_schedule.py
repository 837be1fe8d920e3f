from __future__ import annotations

from typing import Any

import pytest
import torch

from covpool.train.optimizer import Schedule
from covpool.train.recipe import ScheduleOptions

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
    assert max(head) == pytest.approx(10, rel=0.01)  # ten times the rate of what follows
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
