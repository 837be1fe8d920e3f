"""The page of results: every claim of the paper, what was measured, and a verdict, from files alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from covpool.provenance.origin import results_file
from covpool.reproduce import full_size, precisions, record
from covpool.reproduce.claims import CONFIDENCE, Results
from covpool.reproduce.experiments import EXPERIMENTS, TRAINED
from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.experiments.measurement import Measurement
from covpool.reproduce.miniature.configuration import MINIATURE

HEAD = """# The paper's claims, and what was measured

Made by `covpool reproduce page` from the files in [results](../results). The paper trains on ImageNet
and on GPUs. What stands here was trained on {classes} classes of Tiny-ImageNet ({train:,} images of 64
pixels, {val:,} to test on), in minutes on a CPU, by networks of the same form with fewer
channels. Whether a difference has the sign that the paper reports can be seen at this size; how
large it is cannot. Errors are those of the last epoch.

```sh
pip install 'covpool[eval]'
covpool reproduce figure2 --data tiny-imagenet-200          # one of them; stopped, it goes on where it was
covpool reproduce all --data tiny-imagenet-200 --budget 8h  # all that fits: fewer seeds, never fewer rows
covpool reproduce figure2 --data tiny-imagenet-200 --add    # more seeds to results whose runs are gone
covpool reproduce table7 --sets SETS                        # cub, cars, flowers and sparrows, by class
```

Of {claims} claims, {counted}.

**Verdicts.** A difference of errors ± its standard error, from the spread of seeds pooled over the rows
of the experiment that learned, is resolved if it exceeds Student's t at {confidence:.0%}, one-sided.
*Agrees*: resolved, with the paper's sign, and its size within the same margin, where it has one. *Agrees
in sign*: resolved, of another size. *Does not agree*: resolved, with the other sign. *Not resolved
here*: smaller than what seeds make of it, or of one seed, or some seeds failed. Ratios of times are
medians with quartiles in brackets, and are resolved where the quartiles are on one side of 1; two times
are the same within a tenth, and so is memory. Accuracies of Table 7 are resolved by Welch's test of their
own seeds. A run that fails counts as guessing. *Beyond the paper*: it says nothing to agree with.

Runs are in bfloat16 where the CPU multiplies it, in float32 elsewhere; each table tells how many.
{precision}

What the choice of test images adds is not in the ±: between two runs it is about a point on so many
images, so a verdict is on these images. With so many claims, each at {confidence:.0%}, a few are resolved by
chance.
"""


def page(folder: Path, link: str) -> str:
    """As Markdown.

    Args:
        folder: of the results of one version.
        link: the way from the page to that folder.
    """
    parts, verdicts = [], Counter[str]()
    for experiment in EXPERIMENTS.values():
        found, paths = _found(experiment, folder)
        judged = [(claim, claim.judge(found)) for claim in experiment.claims]
        verdicts.update(judgement.verdict for _, judgement in judged)
        claims = record.claim_lines(judged)
        parts += [f"## {experiment.title}", "", f"The paper: {experiment.paper}.", "", *claims, ""]
        parts += _files(paths, link)
        parts += [f"At full size: {experiment.at_full_size}", ""]
    head = _head(verdicts, folder.parent)
    return "\n".join([*head, *parts, "## At full size", "", *full_size.lines()]) + "\n"


def _found(experiment: Experiment | Measurement, folder: Path) -> tuple[Results, list[Path]]:
    if isinstance(experiment, Measurement):
        return experiment.read(folder)
    path = results_file(folder, experiment.name)
    if path is None:
        return record.new_results(experiment, MINIATURE), []
    return json.loads(path.read_text(encoding="utf-8")), [path]


def _files(paths: Sequence[Path], link: str) -> list[str]:
    lines = []
    for path in paths:
        if path.with_suffix(".png").exists():
            lines += [f"![{path.stem}]({link}/{path.stem}.png)", ""]
        lines += [f"[Table]({link}/{path.stem}.md), [figures]({link}/{path.name}).", ""]
    return lines


def _head(verdicts: Counter[str], out: Path) -> list[str]:
    classes = MINIATURE.classes
    precision = precisions.sentence(precisions.differences(TRAINED, out, MINIATURE))
    counted = "; ".join(f"{verdict}: {count}" for verdict, count in verdicts.most_common())
    total = verdicts.total()
    numbers = {"classes": classes, "train": 500 * classes, "val": 50 * classes, "confidence": CONFIDENCE}
    made = HEAD.format(claims=total, counted=counted, precision=precision, **numbers)
    return [*made.splitlines(), ""]
