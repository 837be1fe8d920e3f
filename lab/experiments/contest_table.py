"""The results of the contest as Markdown."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covpool.evaluate.probe.options import Setting as Choice
from covpool.evaluate.probe.options import kind_of
from covpool.evaluate.probe.record import difference, paired_difference
from lab.experiments.arena import DIGITS
from lab.experiments.contest_heads import (
    ATTENTIVE,
    CASES,
    CLOSED,
    DROPS,
    FACTORS,
    HEADS,
    RATES,
    ROUNDS,
    SPLITS,
    TESTED_ON,
    TRAINED,
    Case,
    Setting,
    best_trial,
    is_finished,
    is_measured,
    not_run,
    on_all_splits,
    trial_factor,
    trial_name,
    unfinished,
)

# Half a percentage point: one of the 209 sparrows that are held out.
TIE = 0.005
# How to read brackets around an accuracy.
COUNTS = (
    "In brackets: the same method with its other classifier, trained or in closed form, is more accurate on "
    "held-out images, and counts. With an asterisk: a rule was added to the protocol later, and some of its "
    "trials are left; they may change the setting."
)


def summary(case: Case, cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a case: its measured heads, the best one on held-out images first."""
    measured = {head: cell for head, cell in cells.items() if is_measured(head, cell)}

    def right_share(head: str) -> NDArray[np.float64]:
        digits = [seed["right"] for seed in measured[head]["seeds"].values()]
        shares: NDArray[np.float64] = np.mean(
            [[DIGITS.index(hit) for hit in seed] for seed in digits], axis=0
        )
        return shares

    def best_of(heads: Iterable[str]) -> str | None:
        return max(
            (head for head in heads if head in measured),
            key=lambda head: measured[head]["held_out"],
            default=None,
        )

    rival, average = best_of(ATTENTIVE), best_of(versions("gap"))
    return [
        {
            "head": head,
            "held_out": cell["held_out"],
            "top1": statistics.mean(seed["top1"] for seed in cell["seeds"].values()),
            "setting": cell["setting"]
            if head in CLOSED
            else {**Setting(**cell["setting"])._asdict(), "epochs": cell["epochs"]},
            "complete": is_finished(case, head, cell),
            "counts": head == best_of(versions(head)),
            "minutes": _seconds(cell) / 60,
            "over_gap": paired_difference(right_share(head), right_share(average))
            if average and head != average
            else None,
            "rival": rival,
            "over_rival": paired_difference(right_share(head), right_share(rival))
            if rival and head != rival
            else None,
        }
        for head, cell in sorted(measured.items(), key=lambda item: -item[1]["held_out"])
    ]


def versions(head: str) -> list[str]:
    """Return a head with its other classifier: fixed heads are trained, and solved in closed form."""
    method = CLOSED.get(head, head)
    return [one for one in HEADS if CLOSED.get(one, one) == method]


def counted(rows: Sequence[Mapping[str, Any]], method: str) -> Mapping[str, Any]:
    """Return the row of the classifier of a method that counts; an empty one if the method was not run."""
    return next((row for row in rows if row["head"] in versions(method) and row["counts"]), {})


def label(head: str) -> str:
    """Return the name of a head in a table, with its classifier: trained, or in closed form."""
    return f"`{CLOSED[head]}`, closed form" if head in CLOSED else f"`{head}`, trained"


def accuracy(row: Mapping[str, Any]) -> str:
    """Return the accuracy of a row of :func:`summary` on test images; see ``COUNTS`` for its marks."""
    share = f"{100 * row['top1']:.1f}{'' if row['complete'] else '*'}"
    return share if row["counts"] else f"({share})"


def shortfalls(record: Mapping[str, Any]) -> dict[str, dict[Choice, float]]:
    """Return how far each setting is below the best one on held-out images, by kind of head.

    It is the mean over the cells whose first round is complete: it tries every setting on the same split,
    for a quarter of the epochs. Settings are those of ``covpool probe``: it does not standardize, and reads
    no features before the expansion for attentive heads. The first one is the best.
    """
    found: dict[str, dict[Choice, list[float]]] = {}
    for case in CASES:
        for head, cell in record["cells"].get(case.name, {}).items():
            if head in CLOSED:
                continue
            share, trials = ROUNDS[0][0] * trial_factor(cell["trials"]), cell["trials"]
            names = {
                Choice(lr, drop): trial_name(Setting(lr, drop, "raw"), share, 0)
                for lr, drop in itertools.product(RATES, DROPS)
            }
            if not trials.keys() >= set(names.values()):
                continue
            accuracies = {choice: trials[name]["top1"] for choice, name in names.items()}
            kind = found.setdefault(kind_of(head), {})
            for choice, accuracy in accuracies.items():
                kind.setdefault(choice, []).append(max(accuracies.values()) - accuracy)
    means = {
        kind: {choice: statistics.mean(below) for choice, below in choices.items()}
        for kind, choices in found.items()
    }
    return {kind: dict(sorted(below.items(), key=lambda item: item[1])) for kind, below in means.items()}


def defaults(record: Mapping[str, Any]) -> dict[str, Choice]:
    """Return the setting of each kind of head that is the default of ``covpool probe``.

    Of the settings within ``TIE`` of the best one, it has the highest learning rate, then the lowest dropout.
    """
    return {
        kind: max(
            (choice for choice, distance in below.items() if distance < min(below.values()) + TIE),
            key=lambda choice: (choice.lr, -choice.drop_rate),
        )
        for kind, below in shortfalls(record).items()
    }


def settings_table(record: Mapping[str, Any]) -> str:
    """Return the best settings of each kind of head as Markdown, the default in bold."""
    lines = [
        "Mean distance to the best setting of a head on held-out images, in percentage points, after a "
        "quarter of the epochs: the best three settings of each kind of head. The default is bold. "
        f"Distances that differ by less than {100 * TIE:g} are equal: then the highest learning rate and the "
        "lowest dropout count.",
        "",
        "| kind of head | learning rate | dropout | distance |",
        "|---|---|---|---|",
    ]
    chosen = defaults(record)
    for kind, below in shortfalls(record).items():
        best = list(below)[:3]
        for choice in best if chosen[kind] in best else [*best, chosen[kind]]:
            bold = "**" if choice == chosen[kind] else ""
            values = (f"{choice.lr:g}", f"{choice.drop_rate:g}", f"{100 * below[choice]:.1f}")
            lines.append(f"| {' | '.join([kind, *(f'{bold}{value}{bold}' for value in values)])} |")
    return "\n".join(lines)


def epochs_table(record: Mapping[str, Any]) -> str:
    """Return the test of the number of epochs as Markdown, the chosen number in bold."""
    case = next(case for case in CASES if case.name == TESTED_ON)
    cells = record["cells"].get(case.name, {})
    tried = {
        head: on_all_splits(cells[head]["trials"])
        for head in TRAINED
        if is_measured(head, cells.get(head, {}))
    }
    factors = sorted({1.0, *FACTORS, *(factor for one in tried.values() for _, factor in one)})
    counts = [f"{factor * case.epochs:g}" for factor in factors]
    lines = [
        f"Accuracy on held-out images in percent ({case.title}): the best mean of {SPLITS} splits with each "
        "number of epochs. Bold is the number of epochs of the head: the best one, or the fewest epochs of "
        "equal ones. The last column is the standard error of its mean. On other sets, the trials have the "
        "same share of their epochs, from a half to all. Then half and twice as many are tested, and if the "
        "largest number wins, twice as many again.",
        "",
        f"| head | {' | '.join(f'{count} epochs' for count in counts)} | standard error |",
        "|---" * (2 + len(counts)) + "|",
    ]
    for head, means in tried.items():
        setting, share, _ = best_trial(cells[head]["trials"])
        error = statistics.stdev(means[setting, share]) / SPLITS**0.5
        row = []
        for factor in factors:
            found = [statistics.mean(values) for (_, one), values in means.items() if one == factor]
            bold = "**" if factor == share else ""
            row.append(f"{bold}{100 * max(found):.1f}{bold}" if found else "–")
        lines.append(f"| `{head}` | {' | '.join(row)} | {100 * error:.1f} |")
    return "\n".join(lines)


def gains_and_times(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the titles and cells of the gains, if any, and of the time of each head of a case."""
    titles = {"over_gap": "`gap`", "over_rival": "the best attentive head"}
    shown = [key for key in titles if any(row[key] for row in rows)]
    head = [f"gain over {titles[key]}, percentage points (95 % interval)" for key in shown]
    times = [f"{row['minutes']:.1f}" for row in rows]
    gains = ([difference(row[key]) for key in shown] for row in rows)
    return [[*head, "core-minutes"], *([*over, time] for over, time in zip(gains, times, strict=True))]


def page(record: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "Top-1 accuracy in percent, without flips. Trained heads: mean of three seeds. Held-out images are "
        "training images, which choose the setting. lab/contest.md has the protocol. "
        "Core-minutes are those of all trials and seeds, on cached features; they are rough, because "
        "cells ran on several machines and with several versions. Setting of a trained head: "
        "learning rate, dropout, input, features, weight decay and epochs; in closed form: d. "
        f"{COUNTS}"
    ]
    for case in CASES:
        rows = summary(case, record["cells"].get(case.name, {}))
        if rows:
            titles, *gains = gains_and_times(rows)
            titles = ["head", "held-out images, %", "test images, %", *titles, "setting"]
            lines += ["", f"## {case.title}", "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
            for row, over in zip(rows, gains, strict=True):
                setting = ", ".join(f"{value}" for value in row["setting"].values())
                cells = [label(row["head"]), f"{100 * row['held_out']:.1f}", accuracy(row)]
                lines.append(f"| {' | '.join([*cells, *over, setting])} |")
    lines += ["", "## Number of epochs", "", epochs_table(record)]
    lines += ["", "## Settings of covpool probe", "", settings_table(record)]
    missing, left = not_run(record), unfinished(record)
    lines += [
        "",
        f"## Not run: {len(missing)} of {len(CASES) * len(HEADS)} combinations of a head with a set",
        "",
        "Estimated core-hours: those of the same head on another set, scaled by the size of the features "
        "and, for a closed form, by images and classes. "
        "A question mark stands for a head that has not run on any set. With an asterisk: some trials are "
        "left.",
        "",
        f"| head | {' | '.join(case.name for case in CASES)} |",
        "|---" * (1 + len(CASES)) + "|",
    ]
    for head in HEADS:
        states = []
        for case in CASES:
            name = f"{case.name}:{head}"
            done = "done*" if name in left else "done"
            states.append(_hours(record, case, head) if name in missing else done)
        lines.append(f"| {label(head)} | {' | '.join(states)} |")
    return "\n".join(lines)


def _hours(record: Mapping[str, Any], case: Case, head: str) -> str:
    cells = {other: record["cells"].get(other.name, {}).get(head, {}) for other in CASES}
    measured = [other for other, cell in cells.items() if is_measured(head, cell)]
    if not measured:
        return "?"
    nearest = max(measured, key=lambda other: other.cost(head))
    return f"{_seconds(cells[nearest]) * case.cost(head) / nearest.cost(head) / 3600:.1f}"


def _seconds(cell: Mapping[str, Any]) -> float:
    """Return the time of all trainings of a cell on one core."""
    return float(sum(run["seconds"] for run in (*cell["trials"].values(), *cell["seeds"].values())))
