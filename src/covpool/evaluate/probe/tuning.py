"""Choose the learning rate and the dropout rate of a head on held-out images, by the same trials for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from covpool.evaluate.probe.options import ProbeOptions

LOWEST_LR, HIGHEST_LR = 5e-4, 3e-2
HIGHEST_DROP_RATE = 0.8
# Steps of an additive sequence that fills a square evenly: the inverse of the root of x³ = x + 1, and its
# square.
STEPS = (0.7548776662466927, 0.5698402909980532)


class Setting(NamedTuple):
    """A learning rate and a dropout rate."""

    lr: float
    drop_rate: float


def trial_settings(options: ProbeOptions) -> list[Setting]:
    """Return the settings to try: that of the options first, then others that fill the range evenly.

    They are the same for every head. More trials add to fewer.

    Example:
        >>> trial_settings(ProbeOptions(pretrained=True, trials=2))
        [Setting(lr=0.003, drop_rate=0.5), Setting(lr=0.0014, drop_rate=0.06)]
    """
    found = [Setting(options.lr, options.drop_rate)]
    for i in range(1, options.trials):
        along, across = ((0.5 + i * step) % 1 for step in STEPS)
        lr = LOWEST_LR * (HIGHEST_LR / LOWEST_LR) ** along
        found.append(Setting(float(f"{lr:.2g}"), round(HIGHEST_DROP_RATE * across, 2)))
    return found


def best_trial(trials: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the trial with the highest accuracy on held-out images; of equal ones, the first.

    Args:
        trials: results of :func:`trial_settings` of one head.

    Example:
        >>> low, high = {"top1": 0.5, "top1_flip": 0.5}, {"top1": 0.6, "top1_flip": 0.5}
        >>> best_trial([dict(lr=1.0, val=low), dict(lr=2.0, val=high)])["lr"]
        2.0
    """
    return max(trials, key=lambda trial: (trial["val"]["top1_flip"], trial["val"]["top1"]))
