"""The page of results: every claim of the paper, our measurement and a verdict; tables and figures."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.drawing import png
from covpool.evaluate.probe.record import difference
from covpool.provenance import release
from covpool.storage.files import replace_file
from lab.paper.alexnet import APPROXIMATION, FIGURE2, TABLE3
from lab.paper.claims import (
    CONFIDENCE,
    EQUAL,
    SAME,
    Claim,
    Comparison,
    Judgment,
    Measurement,
    Results,
    Verdict,
    frozen_verdict,
)
from lab.paper.figures import empty_figure
from lab.paper.full_size import full_size_lines
from lab.paper.measured import TABLE2, TABLE7
from lab.paper.resnet import FIGURE4, TABLE4, TABLE5, TABLE6
from lab.record import RESULTS, ROOT, read_record, shown_file
from lab.reproduce.experiments import EXPERIMENTS, Experiment
from lab.reproduce.networks import MINIATURE, Scale
from lab.reproduce.results import empty_results, held_runs, table

# In the order of the paper.
ALL = (FIGURE2, TABLE2, TABLE3, TABLE4, FIGURE4, TABLE5, TABLE6, APPROXIMATION, TABLE7)
COMPARISONS = [each for each in ALL if isinstance(each, Comparison)]
SETS = {"cub": "CUB", "cars": "Cars"}

HEAD = """# The paper's claims, and our measurements

This page compares {claims} claims of the [iSQRT-COV paper](https://arxiv.org/abs/1712.01034) (CVPR 2018)
with our measurements. A claim is, for example, that one pooling method is more accurate or faster than
another.

{hold} claims hold here: {agrees} as the paper reports them, and {sign} with the same sign but another
size, or without a test of the size. {disagree} claims do not hold. For {equal_here} claims, the difference
here is too small to matter. Our measurements do not resolve {unresolved} claims. {not_run} claims were not
tested. {beyond} further comparisons have no number in the paper.

The paper trains on ImageNet with GPUs. The networks here have the same form with fewer channels and layers,
and train in minutes on a CPU, on {classes} classes of Tiny-ImageNet ({train:,} training images of 64 px,
{val:,} test images). They can show the sign of a difference, but not its size on ImageNet.
{by_frozen}

## How to read the verdicts

- *Agrees*: the difference is resolved ([larger than the noise](#how-the-claims-are-tested)) and has the
  paper's sign. If the paper states how large the difference is, our value does not differ significantly
  from it.
- *Agrees in sign*: the difference is resolved and has the paper's sign, but another size. With a frozen
  backbone, this is the best possible verdict.
- *Equal here*: the methods are equal for practical purposes. With a frozen backbone, the 95 % interval lies
  within {equal:g} percentage points of zero, before rounding. For a ratio of times, it lies within
  {same:.0f} % of 1.
- *Does not agree*: the difference is resolved and has the opposite sign. For a claim without a sign, the
  value differs.
- *Not resolved here*: the difference is within seed noise, there is only one seed, or a seed failed.
- *Not run here*: the claim was not tested. The table gives the reason.
- *Beyond the paper*: the paper does not report this number.

## How to read the tables

Terms:

- *Second order* is covariance pooling, and *first order* is average pooling. AlexNet and ResNet alone, as
  in "better than the ResNet", have average pooling. *Plain-COV* is the covariance without a square root.
- *iSQRT-COV* is the method of the paper: Newton-Schulz steps approximate the square root. The covariance is
  first divided by its *norm*: its trace, or its Frobenius norm. *Compensation* multiplies the result by the
  square root of that norm.
- *MPN-COV* (with the exact root), *B-CNN*, *improved B-CNN*, *DeepO2P* and *G2DeNet* are earlier
  second-order methods: `mpn_cov`, `bcnn`, `improved_bcnn`, `deep_o2p` and `g2denet` in
  [Methods](methods.md#all-methods). *EIG* is an eigendecomposition.
- *N* is the number of steps of the Newton-Schulz iteration, and *d* the number of channels after the
  reduction.

Units:

- *Points* are percentage points. "1.3 ± 0.5 points lower" compares top-1 errors: the error of the method
  that the claim names first is lower by 1.3 points, with a standard error of 0.5. "One seed" has no
  standard error.
- "Lower", without a number: the paper gives only the sign.
- *Frozen backbone* compares top-1 accuracies: "CUB +1.3 (+0.8 to +1.8)" means that on CUB-200-2011 the
  method that the claim names first is more accurate by 1.3 points, with a 95 % interval.
- *Times* are ratios: "1.8 times [1.7, 1.9]" means that the slower of the two methods takes 1.8 times as
  long, with a 95 % interval. A training step is a forward and a backward pass.
- If a claim has two verdicts, the bold one counts.

## Number of claims by verdict

Each row is a table, figure or section of the paper. The last column is an example: the first claim that our
measurements resolve.

{summary}

## How the claims are tested

**Networks trained from scratch.** Errors are top-1 errors of the last epoch. The standard error (±) of a
difference comes from the spread over seeds. It is pooled over all settings of the experiment, except those
in which the network did not learn. A difference is resolved if it exceeds its standard error times the
one-sided {confidence:.0f} % quantile of Student's t. A run fails if its loss becomes infinite or NaN. Its
error is then that of random guessing.

The ± does not include the choice of test images. That would add a standard error of about one point to the
difference of two runs. A verdict therefore holds for these test images. With this many claims at
{confidence:.0f} % each, a few are resolved by chance.

Runs use bfloat16 if the CPU has instructions for it, and float32 otherwise. The linked tables give the
number of runs in each precision.
{precision}
{frozen}
**Times and memory.** Ratios of times are medians over rounds that time all methods in turn. The brackets
give the 95 % interval of the median. It is about median ± 1.81 (q3 - q1) / √rounds for quartiles q1 and q3.
A ratio is resolved if this interval excludes 1. Memory within 10 % of the paper's counts as equal; we read
the paper's MB as MiB.

**Table 7.** The differences are of top-1 accuracies, not of errors. They are compared by Welch's test over
seeds. The sparrows are 21 species of CUB-200-2011.

## Repeat it

```sh
pip install -e '.[dev]'   # in a checkout
python -m lab reproduce figure2 --data tiny-imagenet-200 --out runs/results      # rerun the command to resume
python -m lab reproduce all --data tiny-imagenet-200 --out runs/results --budget 8h
python -m lab reproduce figure2 --data tiny-imagenet-200 --seeds 5   # add seeds to the committed results
```

With `--budget`, as many seeds are trained as the time allows. [lab](../lab/README.md) lists all commands,
also those of Table 7. `python -m lab paper` writes this page from the files in [results](../results).
"""
FROZEN = """
**Frozen backbone.** Some claims have this second test. A head is a pooling method with its classifier.
Heads are trained on a frozen EfficientNet-Lite0 at 224 px with ImageNet weights, on data sets with
thousands of test images, and compared image by image. The 95 % interval is over test images; each image
counts with its mean over seeds. This second test decides if its interval excludes zero, or if the heads are
equal (see above). If two data sets disagree, the claim is not resolved.

Heads with another number of steps or another norm use the learning rate and dropout that were
tuned for 5 steps. Differences on frozen features say nothing about their size on ImageNet, so the best
verdict is *agrees in sign*. The results of `python -m lab arena` list the [heads that were
run]({link}/{stem}.md).
"""
VERDICTS: tuple[Verdict, ...] = (
    "agrees",
    "agrees in sign",
    "equal here",
    "does not agree",
    "not resolved here",
    "not run here",
    "beyond the paper",
)
RESOLVED = {*VERDICTS} - {"not resolved here", "not run here"}


def page(folder: Path, link: str) -> str:
    """Return the whole page as Markdown.

    Args:
        folder: folder with the results of one version.
        link: path from the page to that folder.
    """
    return (
        "\n".join([claims_page(folder, link), "## Training time at full size", "", *full_size_lines()]) + "\n"
    )


@dataclass(frozen=True)
class Judged:
    """A claim with its verdicts.

    Attributes:
        claim: the claim.
        by_paper: judgement by the paper's test: networks trained from scratch, or times.
        frozen: judgement by heads on frozen features; ``None`` if there is none.
    """

    claim: Claim
    by_paper: Judgment
    frozen: Judgment | None = None

    @property
    def by_frozen(self) -> bool:
        """Return whether the test on frozen features counts. It is the stronger one if it is resolved."""
        return self.frozen is not None and self.frozen.verdict in RESOLVED

    @property
    def counted(self) -> Judgment:
        """Return the judgement by the stronger test."""
        return self.frozen if self.frozen is not None and self.by_frozen else self.by_paper


def claims_page(folder: Path, link: str) -> str:
    """Return the page without the part on training at full size, whose FLOPs take a while to count."""
    parts, sections = [], []
    arena = shown_file(folder, "arena")
    cases = [] if arena is None else json.loads(arena.read_bytes())["cases"]
    for source in ALL:
        results, paths = _results(source, folder)
        judged = [
            Judged(claim, claim.judge(results), _frozen(source, claim, cases)) for claim in source.claims
        ]
        described = source.experiment if isinstance(source, Comparison) else source
        sections.append((described.title, judged))
        parts += [
            f"## {described.title}",
            "",
            f"In the paper: {described.paper}.",
            "",
            *claim_lines(judged),
            "",
        ]
        parts += _files(described.title, paths, link)
        parts += [f"Differences from the paper's experiment: {source.at_full_size}", ""]
    frozen = "" if arena is None else FROZEN.format(link=link, stem=arena.stem)
    head = _head(sections, frozen, folder.parent)
    return "\n".join([*head, *parts])


def _frozen(source: Comparison | Measurement, claim: Claim, cases: list[dict[str, Any]]) -> Judgment | None:
    """Test a claim on frozen features, on every data set that has results."""
    pair = source.frozen(claim) if isinstance(source, Comparison) else None
    if pair is None:
        return None
    differences = {
        case["case"].partition("-")[0]: tested["difference"]
        for case in cases
        for tested in case["claims"]
        if (tested["better"], tested["other"]) == pair and tested["difference"] is not None
    }
    words = "; ".join(f"{SETS[name]} {difference(value)}" for name, value in differences.items())
    return Judgment(words, frozen_verdict(differences.values()))


def summary_lines(sections: Sequence[tuple[str, Sequence[Judged]]]) -> list[str]:
    """Return a table with the verdicts and the first resolved claim of every section."""
    lines = [
        f"| in the paper | {' | '.join(VERDICTS)} | example: claim, our measurement, verdict |",
        "|---" * (len(VERDICTS) + 2) + "|",
    ]
    for title, judged in sections:
        counts = Counter(each.counted.verdict for each in judged)
        resolved = (
            f"{each.claim.text}: {each.counted.ours}{' points' if each.by_frozen else ''}; "
            f"{each.counted.verdict}"
            for each in judged
            if each.counted.verdict in RESOLVED
        )
        cells = [
            f"[{title.partition(':')[0]}](#{_anchor(title)})",
            *(str(counts[name] or "") for name in VERDICTS),
        ]
        lines.append(f"| {' | '.join([*cells, next(resolved, '')])} |")
    return lines


def _anchor(title: str) -> str:
    """Return the anchor that mkdocs and GitHub give to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _results(source: Comparison | Measurement, folder: Path) -> tuple[Results, list[Path]]:
    if isinstance(source, Measurement):
        return source.read(folder)
    path = shown_file(folder, source.experiment.name)
    if path is None:
        return empty_results(source.experiment, MINIATURE), []
    return json.loads(path.read_text(encoding="utf-8")), [path]


def claim_lines(judged: Sequence[Judged]) -> list[str]:
    """Return a table of the claims and their verdicts, with the test on frozen features if there is one."""
    frozen = any(each.frozen is not None and each.frozen.ours for each in judged)
    titles = ["claim", "in the paper", "our measurement", "verdict"]
    if frozen:
        titles[2:] = ["trained from scratch", "its verdict", "frozen backbone, points", "its verdict"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for each in judged:
        cells = [each.claim.text, each.claim.paper, each.by_paper.ours]
        if not frozen:
            cells.append(each.by_paper.verdict)
        else:
            second = each.frozen or Judgment("", "not run here")
            verdict, frozen_words = each.by_paper.verdict, second.verdict if second.ours else ""
            cells += (
                [verdict, second.ours, f"**{frozen_words}**"]
                if each.by_frozen
                else [f"**{verdict}**", second.ours, frozen_words]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _files(title: str, paths: Sequence[Path], link: str) -> list[str]:
    lines = []
    for path in paths:
        if path.with_suffix(".png").exists():
            lines += [f"![{title}]({link}/{path.stem}.png)", ""]
        name = path.stem.partition("--")[0]
        lines += [f"All results of `{name}`: [table]({link}/{path.stem}.md), [data]({link}/{path.name}).", ""]
    return lines


def _head(sections: Sequence[tuple[str, Sequence[Judged]]], frozen: str, out: Path) -> list[str]:
    classes = MINIATURE.classes
    precision = precision_sentence(precision_differences(EXPERIMENTS.values(), out, MINIATURE))
    every = [each for _, judged in sections for each in judged]
    verdicts = Counter(each.counted.verdict for each in every)
    by_frozen = sum(each.by_frozen for each in every)
    numbers = {
        "classes": classes,
        "train": 500 * classes,
        "val": 50 * classes,
        "confidence": 100 * CONFIDENCE,
    }
    numbers["equal"], numbers["same"] = 100 * EQUAL, 100 * SAME
    words = {
        "claims": len(every) - verdicts["beyond the paper"],
        "hold": verdicts["agrees"] + verdicts["agrees in sign"],
        "agrees": verdicts["agrees"],
        "sign": verdicts["agrees in sign"],
        "equal_here": verdicts["equal here"],
        "disagree": verdicts["does not agree"],
        "unresolved": verdicts["not resolved here"],
        "not_run": verdicts["not run here"],
        "beyond": verdicts["beyond the paper"],
        "by_frozen": f"For {by_frozen} claims, the verdict comes from a larger test with a frozen backbone."
        if by_frozen
        else "",
        "frozen": frozen,
        "summary": "\n".join(summary_lines(sections)),
        "precision": precision,
    }
    text = HEAD.format(**words, **numbers)
    return [*(line.rstrip() for line in text.rstrip().splitlines()), ""]


def precision_differences(experiments: Iterable[Experiment], out: Path, scale: Scale) -> list[float]:
    """Return top-1 errors in float32 minus those in bfloat16, for configurations with results in both."""
    errors: dict[str, dict[str, float]] = {}
    for experiment in experiments:
        for name, run in held_runs(experiment, out, scale).items():
            if not run["failed"]:
                errors.setdefault(name, {})[run["precision"]] = run["epochs"][-1]["top1_error"]
    both = [
        by_precision for by_precision in errors.values() if {"float32", "bfloat16"} <= by_precision.keys()
    ]
    return [by_precision["float32"] - by_precision["bfloat16"] for by_precision in both]


def precision_sentence(points: list[float]) -> str:
    """Describe the differences in a sentence for the page; empty if there are fewer than two."""
    if len(points) < 2:
        return ""
    mean, deviation = statistics.mean(points), statistics.stdev(points)
    direction = "higher" if mean > 0 else "lower"
    return (
        f"{len(points)} networks were trained in both precisions from the same seed.\n"
        f"Their error in float32 was {abs(mean):.1f} points {direction}, "
        f"with a standard deviation of {deviation:.1f}."
    )


def render(comparison: Comparison, path: Path) -> list[Path]:
    """Write the table with the claims (``.md``) and the figure (``.png``) of a results JSON."""
    results = read_record(path)
    judged = [Judged(claim, claim.judge(results)) for claim in comparison.claims]
    lines = [table(comparison.experiment, results), ""]
    lines += ["docs/results.md explains the verdicts and the units.", "", *claim_lines(judged), ""]
    files = {
        path.with_suffix(".md"): "\n".join(lines).encode(),
        path.with_suffix(".png"): _picture(comparison, results),
    }
    for file, content in files.items():
        replace_file(file, content)
    return list(files)


def _picture(comparison: Comparison, results: Results) -> bytes:
    height = 3.4 if len(comparison.experiment.rows) < 15 else 4.8
    figure = empty_figure(height)
    comparison.draw(results, figure)
    figure.suptitle(comparison.experiment.title, fontsize=11, x=0.01, ha="left")
    return png(figure)


def write(out: Path, file: Path) -> list[Path]:
    """Write the tables and figures of the results of this version, and the page; return all paths."""
    folder = out / release()
    files = [
        path
        for comparison in COMPARISONS
        for results in sorted(folder.glob(f"{comparison.experiment.name}--*.json"))
        for path in render(comparison, results)
    ]
    link = Path(os.path.relpath(folder, file.parent)).as_posix()
    replace_file(file, page(folder, link).encode())
    return [*files, file]


def main() -> None:
    """Write the tables and figures of the reproduction in results/, and docs/results.md."""
    print(*write(RESULTS, ROOT / "docs" / "results.md"), sep="\n")
