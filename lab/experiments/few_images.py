"""Heads with few images per class, classes that arrive in steps, and bases from elsewhere.

    python -m lab few_images SETS RUNS            # minutes on two cores; rerun it to resume
    python -m lab figures few_images              # docs/images/few_images.png, docs/images/class_steps.png

SETS has the folder ``sparrows`` with train and test by class. The backbone is EfficientNet-Lite0 at 224
pixels. For 1, 2, 4, 8 and 16 images per class, three draws each, the heads in closed form are solved from
these images alone, basis included, and the trained head of ``covpool probe`` is trained on them and on their
flips. All accuracies are of images without their flips.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.closed_form.kept import basis_of_fit
from covpool.closed_form.solve import Solution, solve
from covpool.closed_form.sums import Rows, Sums
from covpool.errors import UsageError
from covpool.evaluate.probe.features import fit_head, head_outputs
from covpool.models.config import head_config
from covpool.models.create import build_model
from lab.experiments.cached_set import CachedSet
from lab.record import (
    ROOT,
    committed_file,
    new_record,
    read_record,
    resumable_file,
    resumed,
    with_block,
    write_record,
)

NAME = "few_images"
MODEL, SIZE, DIM = "tf_efficientnet_lite0", 224, 128
COUNTS, DRAWS, STEPS = (1, 2, 4, 8, 16), 3, 10
HEADS = {"gap": "gap, closed form", "isqrt_cov": "isqrt_cov, closed form", "trained": "isqrt_cov, trained"}


class Sparrows(CachedSet):
    """The cached features of the sparrows."""

    def accuracy(self, solution: Solution, vectors: Tensor, among: int | None = None) -> float:
        """Return the accuracy on the test images, or on those of the first classes."""
        labels = self.labels["test"]
        chosen = labels < (len(self.classes) if among is None else among)
        scores = (vectors.double() @ solution.weight.T + solution.bias)[chosen]
        return float((scores.argmax(dim=1) == labels[chosen]).double().mean())

    def drawn(self, count: int, seed: int) -> NDArray[np.int64]:
        """Return the numbers of some training images of every class."""
        random = np.random.default_rng([seed, count])
        labels = self.labels["train"].numpy()
        return np.sort(
            np.concatenate(
                [random.permutation(np.flatnonzero(labels == k))[:count] for k in range(len(self.classes))]
            )
        )


def few(sparrows: Sparrows, count: int, seed: int) -> dict[str, float]:
    """Return the accuracies of the heads on some images of every class."""
    ids, test = sparrows.drawn(count, seed), np.arange(len(sparrows.labels["test"]))
    basis = sparrows.basis(ids, DIM)
    accuracies = {}
    poolings: dict[str, Callable[[str, NDArray[np.int64]], Tensor]] = {
        "gap": sparrows.averages,
        "isqrt_cov": lambda split, some: sparrows.covariances(split, some, basis),
    }
    for head, vectors in poolings.items():
        solution = sparrows.solved(vectors("train", ids), ids)
        accuracies[head] = sparrows.accuracy(solution, vectors("test", test))
    config = head_config(
        "isqrt_cov",
        sparrows.probing.backbone,
        DIM,
        sparrows.options.setting("isqrt_cov").drop_rate,
        expands=sparrows.probing.expands,
    )
    torch.manual_seed(seed)
    model = build_model(config, pretrained=True)
    fit_head(model, sparrows.cached["train"], ids, sparrows.options, seed, lambda done, total: None)
    right = [
        (logits[0].argmax(dim=1) == sparrows.labels["test"][torch.from_numpy(some)]).double()
        for some, logits in head_outputs(model, sparrows.cached["test"], test)
    ]
    return accuracies | {"trained": float(torch.cat(right).mean())}


def steps(sparrows: Sparrows) -> list[dict[str, float]]:
    """Add the classes in ten steps to sums, with the basis of the first; compare with all at once."""
    labels, test = sparrows.labels["train"].numpy(), np.arange(len(sparrows.labels["test"]))
    ends = [round((k + 1) * len(sparrows.classes) / STEPS) for k in range(STEPS)]
    first = np.flatnonzero(labels < ends[0])
    bases = {"first": sparrows.basis(first, DIM), "own": sparrows.basis(np.arange(len(labels)), DIM)}
    train, tests = (
        {name: sparrows.covariances(split, ids, basis) for name, basis in bases.items()}
        for split, ids in (("train", np.arange(len(labels))), ("test", test))
    )
    averages, test_averages = (
        sparrows.averages("train", np.arange(len(labels))),
        sparrows.averages("test", test),
    )
    grown = Sums("", sparrows.classes, train["first"].shape[1])
    rows, start = [], 0
    for end in ends:
        new, seen = np.flatnonzero((labels >= start) & (labels < end)), np.flatnonzero(labels < end)
        grown.add(Rows(train["first"][new], torch.from_numpy(labels[new]), torch.from_numpy(new)))
        solution, at_once = solve(grown), sparrows.solved(train["first"][seen], seen)
        own = sparrows.solved(train["own"][seen], seen)
        gap = sparrows.solved(averages[seen], seen)
        rows.append(
            {
                "classes": end,
                "isqrt_cov": sparrows.accuracy(solution, tests["first"], end),
                "own_basis": sparrows.accuracy(own, tests["own"], end),
                "gap": sparrows.accuracy(gap, test_averages, end),
                "largest_difference": float((solution.weight - at_once.weight).abs().max()),
            }
        )
        start = end
    return rows


def bases(sparrows: Sparrows, runs: Path) -> dict[str, float]:
    """Return the accuracy of isqrt_cov with bases of other images."""
    labels, ids = sparrows.labels["train"].numpy(), np.arange(len(sparrows.labels["train"]))
    test = np.arange(len(sparrows.labels["test"]))
    channels = sparrows.maps("train", ids[:1]).shape[1]
    normal = torch.randn(channels, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: dict[str, Callable[[], Tensor]] = {
        "all classes": lambda: sparrows.basis(ids, DIM),
        "the first 10 of 21 classes": lambda: sparrows.basis(np.flatnonzero(labels < 10), DIM),
        "random directions": lambda: torch.linalg.qr(normal)[0][:DIM].float(),
    }
    for name, title in (("flowers", "Flowers-102"), ("cars", "Stanford Cars"), ("cub", "CUB-200-2011")):
        fitted = runs / f"{name}-lite0-224"
        if (fitted / "results.json").exists():
            found[title] = lambda fitted=fitted: basis_of_fit(fitted, DIM)  # type: ignore[misc]
    accuracies = {}
    for name, make in found.items():
        try:
            basis = make()
        except UsageError:  # the best head of that fit has fewer channels
            continue
        solution = sparrows.solved(sparrows.covariances("train", ids, basis), ids)
        accuracies[name] = sparrows.accuracy(solution, sparrows.covariances("test", test, basis))
    return accuracies


def main(sets: Path, runs: Path) -> None:
    """Measure heads with few images per class, in steps of classes, and with bases from elsewhere.

    Args:
        sets: folder with sparrows, which has train and test by class.
        runs: folder of cached features, and of the fits of one_pass, whose bases are tried if they are there.
    """
    record = new_record(NAME, ("functional", "nn", "closed_form", "evaluate")) | {"few": {}}
    file = resumable_file(record)
    record = resumed(record, file)
    sparrows = Sparrows(sets / "sparrows", runs, MODEL, SIZE)
    for count in COUNTS:
        for seed in range(DRAWS):
            if (name := f"{count}-{seed}") not in record["few"]:
                record["few"][name] = few(sparrows, count, seed)
                write_record(file, record)
                print(name, record["few"][name], flush=True)
    record["steps"] = steps(sparrows)
    record["bases"] = record.get("bases", {}) | bases(sparrows, runs)
    write_record(file, record, page(record))
    print(file)


def page(record: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "Top-1 accuracy in percent on test images of 21 sparrow species, with a frozen EfficientNet-Lite0 at "
        "224 px. `gap` is average pooling, `isqrt_cov` is covariance pooling with d = 128. With few images "
        "per class: mean ± standard deviation of three draws of the training images.",
        "",
        few_table(record),
        "",
        "`isqrt_cov` in closed form, with a reduction to d channels (basis) that was fitted to other images:",
        "",
        bases_table(record),
        "",
        "Classes added in steps, in closed form. Accuracy is that among the classes so far. The last column "
        "compares the weights of the classifier with those of one fit to all images so far, with the same "
        "basis.",
        "",
        "| classes so far | `isqrt_cov` in steps, basis of the first classes, % | `isqrt_cov` at once, basis "
        "of all classes so far, % | `gap` at once, % | largest difference of a weight |",
        "|---" * 5 + "|",
    ]
    lines += [
        f"| {row['classes']} | {100 * row['isqrt_cov']:.1f} | {100 * row['own_basis']:.1f} "
        f"| {100 * row['gap']:.1f} | {row['largest_difference']:.0e} |"
        for row in record["steps"]
    ]
    return "\n".join(lines)


def few_table(record: dict[str, Any]) -> str:
    """Return the accuracies with few images per class as Markdown."""
    titles = ["training images per class", *(f"{title}, %" for title in HEADS.values())]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for count in COUNTS:
        means = [mean_and_spread(record, count, head) for head in HEADS]
        cells = [f"{100 * mean:.1f} ± {100 * spread:.1f}" for mean, spread in means]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bases_table(record: dict[str, Any]) -> str:
    """Return the accuracies with other bases as Markdown."""
    lines = ["| basis from | top-1 accuracy on the sparrows, % |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {name} | {100 * accuracy:.1f} |" for name, accuracy in record["bases"].items())]
    )


def mean_and_spread(record: dict[str, Any], count: int, head: str) -> tuple[float, float]:
    """Return the mean of the draws, and their standard deviation."""
    values = [record["few"][f"{count}-{seed}"][head] for seed in range(DRAWS)]
    return statistics.mean(values), statistics.stdev(values)


def write_pages(file: Path | None = None, folder: Path = ROOT / "docs" / "images") -> list[Path]:
    """Draw both figures, and write the tables of docs/closed_form.md and docs/answers/images_per_class.md.

    Args:
        file: results of ``python -m lab few_images``; the committed ones if not given.
        folder: folder of the figures.
    """
    from matplotlib.figure import Figure

    record = read_record(file or committed_file(NAME), NAME)
    colors = {"gap": "#777777", "isqrt_cov": "#0072B2", "trained": "#D55E00", "own_basis": "#56B4E9"}
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for head, title in HEADS.items():
        means, spreads = zip(*(mean_and_spread(record, count, head) for count in COUNTS), strict=True)
        axes.errorbar(
            COUNTS,
            100 * np.array(means),
            yerr=100 * np.array(spreads),
            fmt="o-",
            label=title,
            color=colors[head],
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axes.set(
        xlabel="training images per class",
        ylabel="test accuracy in %",
        title="21 sparrows, frozen EfficientNet-Lite0",
    )
    axes.legend()
    figure.savefig(folder / "few_images.png", dpi=140)

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, title in (
        ("isqrt_cov", "isqrt_cov, classes added in steps, basis of the first two"),
        ("own_basis", "isqrt_cov, all images at once"),
        ("gap", "gap, all images at once"),
    ):
        axes.plot(
            [row["classes"] for row in record["steps"]],
            [100 * row[key] for row in record["steps"]],
            "o-",
            label=title,
            color=colors[key],
        )
    axes.set_xticks([row["classes"] for row in record["steps"]])
    axes.set(
        xlabel="classes so far", ylabel="test accuracy in % among them", title="21 sparrows in ten steps"
    )
    axes.legend()
    figure.savefig(folder / "class_steps.png", dpi=140)
    blocks = {"closed_form.md": ("bases", bases_table), "answers/images_per_class.md": (NAME, few_table)}
    pages = []
    for name, (mark, made) in blocks.items():
        pages.append(page := ROOT / "docs" / name)
        page.write_text(with_block(page.read_text("utf-8"), mark, made(record)), "utf-8")
    return [folder / "few_images.png", folder / "class_steps.png", *pages]
