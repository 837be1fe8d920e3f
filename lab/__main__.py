"""Run a measurement, or write a page: ``python -m lab NAME``. ``python -m lab --help`` lists the names."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, get_type_hints

from jsonargparse import auto_cli

from covpool.errors import CovpoolError

# By name: the function, and a summary. The parameters of the function are the options.
COMMANDS = {
    "bench": ("bench.methods:main", "time and memory of every pooling method, next to the paper's"),
    "isqrt_cov": (
        "bench.isqrt_cov:main",
        "isqrt_cov against eigh, svd, the paper's equations and bare products",
    ),
    "sums": ("bench.sums:main", "cost of sums of vectors from a thousand to a million images"),
    "fit_time": ("bench.fit_time:main", "covpool fit against a bare pass of the backbone"),
    "layer": ("bench.layer:main", "the layer against its products; networks with it against gap"),
    "training": ("bench.training:main", "overhead of the training loop; shards; two processes"),
    "sharded": ("bench.sharded:main", "divided classifier against a dense one: bytes and seconds"),
    "reproduce": ("reproduce.runner:main", "tables and figures of the paper in miniature"),
    "paper": ("paper.page:main", "verdicts on the paper's claims, from the results: docs/results.md"),
    "arena": ("experiments.arena:main", "all heads on frozen backbones, each tuned by the same trials"),
    "one_pass": ("experiments.one_pass:main", "heads in closed form against trained ones (frozen)"),
    "fixed_methods": ("experiments.fixed_methods:main", "pooling methods without parameters, in closed form"),
    "contest": ("experiments.contest:main", "all heads with their best settings (lab/contest.md)"),
    "board": ("experiments.board:main", "a row for the board of Efficient Probing (lab/board.md)"),
    "few_images": ("experiments.few_images:main", "few images per class, classes in steps, other bases"),
    "fine_grained": ("experiments.fine_grained:main", "frozen backbones on fine-grained sets (Table 7)"),
    "fine_tuning": ("experiments.fine_tuning:main", "fine-tuning with both poolings (Table 7)"),
    "cub_epochs": ("experiments.cub_epochs:main", "whole networks on CUB-200-2011, by epoch (Figure 4)"),
    "tiny10": ("experiments.tiny10:main", "training from scratch on ten classes of Tiny-ImageNet"),
    "classifier_rate": ("experiments.classifier_rate:main", "learning rate of the classifier, from scratch"),
    "sparrows": ("experiments.sparrows:main", "training from pretrained weights on 21 sparrow species"),
    "exports": ("experiments.exports:main", "exported networks against their bundles"),
    "svm_solvers": ("experiments.svm_solvers:main", "LinearSVC against the streaming solver"),
    "location_maps": ("experiments.location_maps:main", "exact maps against Grad-CAM"),
    "bulk": ("experiments.bulk:main", "decoding and inference rates of one core"),
    "fitted_steps": (
        "experiments.fitted_steps:main",
        "coefficients of Newton-Schulz steps, and their errors",
    ),
    "fitted_heads": ("experiments.fitted_heads:main", "accuracy with the paper's steps and with fitted ones"),
    "half_precision": ("experiments.half_precision:main", "errors of half precision and of fitted steps"),
    "spectra": ("experiments.spectra:main", "eigenvalues before and after each method"),
    "why_second_order": ("experiments.why_second_order:main", "two species that differ in covariance alone"),
}
# The same for ``python -m lab figures NAME``, which writes parts of pages, tables and pictures.
FIGURES = {
    "accuracy": ("figures.accuracy:write_pages", "accuracies in README.md and docs, and two pictures"),
    "llms": ("figures.llms:write_pages", "docs/llms.txt"),
    "packages": ("figures.packages:write_pages", "docs/images/packages.svg"),
    "recipes": ("figures.recipes:write_pages", "the table in docs/recipes.md"),
    "methods": ("bench.methods_page:write_pages", "page and picture of the results of bench"),
    "isqrt_cov": ("bench.isqrt_cov:write_pages", "page and picture of its results; table in benchmarks.md"),
    "layer": ("bench.layer:write_pages", "tables of the layer in README.md and docs/benchmarks.md"),
    "sharded": ("bench.sharded:write_pages", "tables and picture of docs/scale_out.md"),
    "sums": ("bench.sums:write_pages", "the tables of cost in docs/closed_form.md"),
    "one_pass": ("experiments.one_pass:write_pages", "the table of accuracies in docs/closed_form.md"),
    "fixed_methods": ("experiments.fixed_methods:write_pages", "the table of accuracies in docs/methods.md"),
    "few_images": ("experiments.few_images:write_pages", "two pictures, and tables of two pages"),
    "fitted_steps": ("experiments.fitted_steps:write_pages", "docs/images/fitted_steps.png"),
    "spectra": ("experiments.spectra:write_pages", "docs/images/spectra.png"),
    "why_second_order": ("experiments.why_second_order:write_pages", "docs/images/why_second_order.png"),
}


def main(words: Sequence[str]) -> int:
    """Run a command line, and return its exit code."""
    command, table = "python -m lab", COMMANDS
    if words[:1] == ["figures"]:
        command, table, words = f"{command} figures", FIGURES, words[1:]
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(listing(command, table))
        return 0
    if name not in table:
        print(f"{command}: {name!r} is not one of {', '.join(table)}", file=sys.stderr)
        return 2
    function = pkgutil.resolve_name(f"lab.{table[name][0]}")
    try:
        args = with_lists(words[1:], get_type_hints(function))
        written = auto_cli(function, args=args, as_positional=True, prog=f"{command} {name}")
    except CovpoolError as error:
        print(f"{command} {name}: {error}", file=sys.stderr)
        return 2
    if table is FIGURES:
        print(*written, sep="\n")
    return 0


def with_lists(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """Return ``--methods gap,cov`` as ``--methods [gap,cov]``, for options that take several values."""
    several = {f"--{name}" for name, hint in hints.items() if "tuple[" in str(hint)}
    return [
        f"[{word}]" if before in several and not word.startswith("[") else word
        for before, word in pairwise(["", *words])
    ]


def listing(command: str, table: dict[str, tuple[str, str]]) -> str:
    """Return the names of a table with their summaries."""
    more = {"figures": ("", "pictures, tables and pages, from the results")} if table is COMMANDS else {}
    lines = [f"  {name.ljust(16)}  {summary}" for name, (_, summary) in {**table, **more}.items()]
    return "\n".join([f"usage: {command} NAME ...", *lines, f"{command} NAME --help lists the options."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
