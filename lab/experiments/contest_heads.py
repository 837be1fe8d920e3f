"""What the contest compares: data sets with backbones, heads and their settings (``lab/contest.md``)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from covpool.inference import Precision
from lab.experiments.one_pass import Row

NAME = "contest"
PUBLISHED = "efficient_probing@batchnorm=true"
ATTENTIVE = ("abmilp", "simpool", "attentive", "efficient_probing", PUBLISHED)
FIXED = ("gap", "cov", "mpn_cov", "isqrt_cov")
# Heads of many small operations, which torch.compile joins: two to three times faster. Others gain nothing.
FUSED = ("gem", "simpool")
TRAINED = (*FIXED, "gem", *ATTENTIVE, "isqrt_cov+gap")
RATES, DROPS, INPUTS = (3e-4, 1e-3, 3e-3, 1e-2), (0.0, 0.25, 0.5), ("raw", "standardized")
# The share of the epochs and the number of splits of each round; a quarter of the settings survives a round.
ROUNDS = ((0.25, 1), (0.5, 2), (1.0, 3))
SURVIVORS = 4
SPLITS, SEEDS = 3, 3
# Whether fewer or more epochs help is tested with these factors, for every trained head on this set.
FACTORS, TESTED_ON = (0.25, 0.5, 2.0), "sparrows-lite0-224"
# Beyond the grid, in order: tried if a setting at its edge wins. Weight decays are tried on the set above.
BEYOND_RATES, BEYOND_DROPS = (3e-5, 1e-4, *RATES, 3e-2, 1e-1), (*DROPS, 0.75)
MOST_EPOCHS = 8.0  # as a factor of the epochs of the case
# Long training with the largest dropout is tried on sets whose first round has few epochs.
LONG_DROP, LONG_FACTORS = BEYOND_DROPS[-1], (1.0, 2.0)
WEIGHT_DECAY, WEIGHT_DECAYS = 0.05, (0.05, 0.5, 5.0)
# Fixed heads in closed form, and the numbers of channels to choose from; average pooling has no choice.
CLOSED = {f"{head}, closed form": head for head in FIXED}
HEADS = (*CLOSED, *TRAINED)
# The order of tables: average, attentive and covariance heads, the last ones trained and in closed form.
BY_KIND = ("gap, closed form", "gap", "gem", *ATTENTIVE, *FIXED[1:], "isqrt_cov+gap", *list(CLOSED)[1:])
# The size of a training run, to say how many hours a cell would take.
TRAINING_IMAGES = {"sparrows": 629, "flowers": 6552, "cub": 5994, "cars": 8137}
CLASSES = {"sparrows": 21, "flowers": 102, "cub": 200, "cars": 196}
CHANNELS = {"lite0": 1280, "resnet50": 2048}


class Case(Row):
    """A data set with a backbone at an image size."""

    @property
    def epochs(self) -> int:
        """The number of epochs of a training run."""
        return 60 if self.data == "sparrows" else 20

    @property
    def precision(self) -> Precision:
        """The precision of the backbone: ResNet-50 takes a quarter of the time in bfloat16."""
        return "bfloat16" if self.backbone == "resnet50" and self.data != "sparrows" else "float32"

    def cost(self, head: str) -> int:
        """Return the cost of a cell, up to a factor of its head.

        Training reads the features in every epoch. A closed form is solved for every class.
        """
        images = TRAINING_IMAGES[self.data]
        if head in CLOSED:
            return images * CLASSES[self.data]
        return CHANNELS[self.backbone] * (self.size // 32) ** 2 * images * self.epochs


CASES = tuple(
    Case(*words)
    for words in (
        ("sparrows", "lite0", 224),
        ("sparrows", "resnet50", 224),
        ("flowers", "lite0", 224),
        ("cub", "lite0", 224),
        ("cars", "lite0", 224),
        ("cub", "resnet50", 224),
        ("cars", "resnet50", 224),
        ("cub", "lite0", 448),
        ("cars", "lite0", 448),
    )
)


class Setting(NamedTuple):
    """What is chosen on held-out images.

    Attributes:
        lr: learning rate.
        drop_rate: dropout rate before the classifier.
        input: ``raw``, or ``standardized`` per channel.
        features: ``stage`` or ``head``: before or after the channel expansion, for attentive heads.
        weight_decay: of AdamW.
    """

    lr: float
    drop_rate: float
    input: str
    features: str = "head"
    weight_decay: float = WEIGHT_DECAY


def settings_of(head: str, *, expands: bool) -> list[Setting]:
    """Return the grid of a head."""
    both = head in ATTENTIVE and expands
    return [
        Setting(*values)
        for values in itertools.product(RATES, DROPS, INPUTS, ("head", "stage") if both else ("head",))
    ]


def trial_name(setting: Setting, share: float, split: int) -> str:
    """Return the key of a trial in the results."""
    decay = "" if setting.weight_decay == WEIGHT_DECAY else f"{setting.weight_decay:g},"
    return f"{setting.lr:g},{setting.drop_rate:g},{setting.input},{setting.features},{decay}{share:g},{split}"


def trial_factor(trials: Iterable[str]) -> float:
    """Return the factor of the epochs with which trials were run, from their names."""
    return min(float(name.split(",")[-2]) for name in trials) / ROUNDS[0][0]


def on_all_splits(trials: Mapping[str, Mapping[str, Any]]) -> dict[tuple[Setting, float], list[float]]:
    """Return the accuracies of the settings and shares of the epochs that ran on all splits."""
    accuracies: dict[str, list[float]] = {}
    for name, trial in trials.items():
        accuracies.setdefault(name.rpartition(",")[0], []).append(trial["top1"])
    found = {}
    for name, values in accuracies.items():
        if len(values) == SPLITS:
            lr, drop, source, features, *decay, share = name.split(",")
            setting = Setting(float(lr), float(drop), source, features, *map(float, decay))
            found[setting, float(share)] = values
    return found


def best_trial(trials: Mapping[str, Mapping[str, Any]]) -> tuple[Setting, float, float]:
    """Return the setting and the share of the epochs with the best mean over all splits, and this mean.

    Of equal ones, the fewest epochs count.
    """
    means = {key: statistics.mean(values) for key, values in on_all_splits(trials).items()}
    best = max(means, key=lambda key: (means[key], -key[1]))
    return *best, means[best]


def beyond(case: Case, setting: Setting) -> list[Setting]:
    """Return the settings next to one that are outside the grid."""

    def next_to(values: Sequence[float], value: float) -> list[float]:
        k = values.index(value)
        return [*values[max(0, k - 1) : k], *values[k + 1 : k + 2]]

    others = [setting._replace(lr=rate) for rate in next_to(BEYOND_RATES, setting.lr) if rate not in RATES]
    others += [
        setting._replace(drop_rate=drop)
        for drop in next_to(BEYOND_DROPS, setting.drop_rate)
        if drop not in DROPS
    ]
    if case.name == TESTED_ON:
        others += [
            setting._replace(weight_decay=decay) for decay in next_to(WEIGHT_DECAYS, setting.weight_decay)
        ]
    return others


def untried(
    case: Case, setting: Setting, share: float, trials: Mapping[str, Any]
) -> list[tuple[Setting, float]]:
    """Return what is left to try next to the best trial: settings beyond the grid, and twice the epochs.

    Args:
        case: a set with a backbone.
        setting: of the best trial.
        share: of its epochs.
        trials: the trials so far.
    """
    others = [(one, share) for one in beyond(case, setting)]
    if share < MOST_EPOCHS:
        others.append((setting, 2 * share))
    return [(one, of) for one, of in others if trial_name(one, of, SPLITS - 1) not in trials]


def further_trials(case: Case, factor: float) -> list[tuple[float | None, float]]:
    """Return what is tried on all splits with the setting that won the rounds, before the edges of the grid.

    Args:
        case: a set with a backbone.
        factor: of the number of epochs in the rounds.

    Returns:
        Dropouts, ``None`` for that of the setting, each with a factor of the number of epochs.
    """
    if case.name == TESTED_ON:
        return [(None, other) for other in FACTORS]
    others: list[tuple[float | None, float]] = [
        (None, other) for other in (factor / 2, 2 * factor) if other <= 1
    ]
    return others if case.data == "sparrows" else others + [(LONG_DROP, other) for other in LONG_FACTORS]


def seeds_of(head: str) -> int:
    """Return the number of seeds of a head; a closed form has no seed, and runs once."""
    return 1 if head in CLOSED else SEEDS


def is_measured(head: str, cell: Mapping[str, Any]) -> bool:
    """Return whether a cell has the accuracy of a chosen setting; see :func:`is_finished`."""
    return "held_out" in cell and len(cell.get("seeds", {})) >= seeds_of(head)


def is_finished(case: Case, head: str, cell: Mapping[str, Any]) -> bool:
    """Return whether a cell has every training: its seeds, and all trials of the protocol.

    A rule that is added to the protocol adds trials to cells that have been measured.
    """
    if not is_measured(head, cell):
        return False
    if head in CLOSED:
        return True
    setting, share, _ = best_trial(cell["trials"])
    if (Setting(**cell["setting"]), cell["epochs"]) != (setting, round(share * case.epochs)):
        return False
    names = cell["trials"]

    def has(drop: float | None, share: float) -> bool:
        ending, drops = f",{share:g},{SPLITS - 1}", "" if drop is None else f"{drop:g}"
        return any(name.endswith(ending) and name.split(",")[1].startswith(drops) for name in names)

    tested = all(has(*trial) for trial in further_trials(case, trial_factor(names)))
    return tested and not untried(case, setting, share, names)


def _cells(record: Mapping[str, Any]) -> Iterator[tuple[Case, str, Mapping[str, Any]]]:
    for case, head in itertools.product(CASES, HEADS):
        yield case, head, record["cells"].get(case.name, {}).get(head, {})


def not_run(record: Mapping[str, Any]) -> list[str]:
    """Return the cells without an accuracy."""
    return [f"{case.name}:{head}" for case, head, cell in _cells(record) if not is_measured(head, cell)]


def unfinished(record: Mapping[str, Any]) -> list[str]:
    """Return the cells that have trials or seeds left."""
    return [f"{case.name}:{head}" for case, head, cell in _cells(record) if not is_finished(case, head, cell)]
