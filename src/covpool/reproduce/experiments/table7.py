"""Table 7: fine-grained sets, by frozen probing, SVMs and fine-tuning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from covpool.errors import UsageError
from covpool.provenance.origin import new_results, results_path
from covpool.reproduce import fine_grained, fine_tuning
from covpool.reproduce.claims import CONFIDENCE, Claim, Judgement, not_run
from covpool.reproduce.experiments.measurement import Measurement, Results

PROBED, TUNED = "fine_grained", "fine_tuning"


def run(sets: Path | None, runs: Path, out: Path) -> None:
    """All cases of :mod:`covpool.reproduce.fine_grained` and :mod:`covpool.reproduce.fine_tuning`."""
    if sets is None:
        raise UsageError(
            "table7 needs the image sets: give --sets a folder with cub, cars, flowers, sparrows"
        )
    head = new_results((), {}, "cpu", None)
    for experiment, name in ((fine_grained, PROBED), (fine_tuning, TUNED)):
        experiment.main(str(sets), str(runs / name), str(results_path(out, name, head)))


def _probed(
    text: str, data: str, paper: str, *, part: str, better: str, than: str, dims: tuple[int, int]
) -> Claim:
    """One head is above another, both on the frozen EfficientNet-Lite0 at 224 pixels."""

    def judge(results: Results) -> Judgement:
        heads = [
            _head(results, data, head, dim, part) for head, dim in zip((better, than), dims, strict=True)
        ]
        if None in heads:
            return Judgement("", "not run here")
        (high, high_seeds), (low, low_seeds) = heads  # type: ignore[misc]
        return _beyond(_above(high, low, high_seeds, low_seeds), paper)

    return Claim(text, paper, judge)


def _head(results: Results, data: str, head: str, dim: int, part: str) -> tuple[dict[str, float], int] | None:
    for made in results.get(PROBED, {}).get("cases", []):
        case = made["case"]
        if (case["data"], case["backbone"], case["size"], case["dim"]) != (data, "lite0", 224, dim):
            continue
        for found in made["heads"]:
            if found["head"] == head and found[part] is not None:
                seeds = sum(row["head"] == head and row[part] is not None for row in made["rows"])
                return found[part]["top1_flip"], seeds
    return None


def _above(high: dict[str, Any], low: dict[str, Any], high_seeds: int, low_seeds: int) -> Judgement:
    """Resolved by Welch's test, one-sided; one seed has no spread, and is told as such."""
    difference = 100 * (high["mean"] - low["mean"])
    if high["sd"] is None or low["sd"] is None:
        return Judgement(f"{difference:+.1f} points, one seed", "not resolved here")
    # Their own spreads, not pooled: backbones and sets differ.
    parts = [(one["sd"] ** 2 / seeds, seeds) for one, seeds in ((high, high_seeds), (low, low_seeds))]
    error = 100 * math.sqrt(sum(part for part, _ in parts))
    ours = f"{difference:+.1f} ± {error:.1f} points"
    from scipy.stats import t

    if error:
        freedom = sum(part for part, _ in parts) ** 2 / sum(part**2 / (seeds - 1) for part, seeds in parts)
        if abs(difference) <= error * float(t.ppf(CONFIDENCE, freedom)):
            return Judgement(ours, "not resolved here")
    return Judgement(ours, "agrees in sign" if difference > 0 else "does not agree")


def _beyond(found: Judgement, paper: str) -> Judgement:
    """No verdict where the paper has nothing to agree with."""
    return Judgement(found.ours, "beyond the paper") if paper == NO_ROW else found


def _tuned(results: Results) -> Judgement:
    rows = [row for row in results.get(TUNED, {}).get("rows", []) if row["data"] == "sparrows"]
    top1 = {
        pool: [row["metrics"]["top1"] for row in rows if row["pool"] == pool] for pool in ("isqrt_cov", "gap")
    }
    if not all(top1.values()):
        return Judgement("", "not run here")
    high, low = (fine_tuning.spread(values) for values in top1.values())
    return _beyond(_above(high, low, len(top1["isqrt_cov"]), len(top1["gap"])), NO_ROW)


NO_ROW = "has no row of first order"
KERNEL = "kernel pooling is not among the methods"
EXPERIMENT = Measurement(
    name="table7",
    title="Table 7: fine-grained sets",
    paper="with ResNet-50, 88.1 on birds, 90.0 on aircraft and 92.8 on cars; with d=128, 87.3, 89.5 and 91.7",
    at_full_size=(
        "Backbones of 25 to 45 million parameters trained with second order on ImageNet, fine-tuned "
        "whole at 448 pixels. Settings of the heads and of fine-tuning were chosen on the sparrows, their "
        "test images in view, and these are a part of the birds: cars and flowers were not looked at."
    ),
    files=(PROBED, TUNED),
    claims=(
        *(
            _probed(
                f"Second order is above first order, frozen, {name}",
                data,
                NO_ROW,
                part="test",
                better="isqrt_cov",
                than="gap",
                dims=(128, 128),
            )
            for data, name in (("sparrows", "sparrows"), ("cub", "birds"), ("cars", "cars"))
        ),
        Claim("Second order is above first order, fine-tuned, sparrows", NO_ROW, _tuned),
        _probed(
            "The larger covariance is above half of it, with SVMs: birds there, sparrows here",
            "sparrows",
            "0.8 points above",
            part="svm",
            better="isqrt_cov",
            than="isqrt_cov",
            dims=(128, 64),
        ),
        not_run("d=128 is above kernel pooling on birds", "2.6 points above", KERNEL),
        not_run("d=128 is above kernel pooling on aircraft", "3.8 points above", KERNEL),
        not_run("d=128 is above kernel pooling on cars", "0.6 points above", KERNEL),
        *(
            not_run(
                f"iSQRT-COV of 32K is above that of 8K on {name}",
                f"{points} points above",
                "no ResNet-50 of second order",
            )
            for name, points in (("aircraft", 0.5), ("cars", 1.1))
        ),
        not_run("ResNet-101 on birds, aircraft and cars", "88.7, 91.4 and 93.3", "no GPU was at hand"),
        not_run("Aircraft by ResNet-50", "90.0", "the set is not at hand; its reader is tested"),
    ),
    run=run,
    needs_sets=True,
)
