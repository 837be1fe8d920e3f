"""``covpool bench``: see :func:`covpool.bench.run_methods`; one dataclass per subcommand."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from covpool.errors import UsageError
from covpool.functional.arguments import did_you_mean


@dataclass(frozen=True)
class Methods:
    """Measure time and memory of every pooling method, next to the paper's Table 2 and Figure 3.

    It takes about 15 minutes on two cores. It writes a JSON, a page and a figure, and prints the page.

    Attributes:
        out: results folder.
        sections: parts to measure: ``layers`` (Table 2), ``training`` (Figure 3), as ``[layers]``; both if
            not given.
        methods: pooling methods, as ``[gap,mpn_cov]``; all if not given. isqrt_cov, the reference, is always
            measured.
        sizes: feature sizes of the layers, as ``[13x13]``: 13x13, 14x14, 7x7, vit, 28x28; or channels and
            positions, as ``["64:49"]``.
        batch: images per batch of a layer; the size's own if not given.
        rounds: timed rounds of the layers.
        batch_sizes: batch sizes of the training steps, as ``[8,16]``.
        step_rounds: timed rounds of the training steps.
        device: device of the layers; training steps always run on the CPU.
        seed: random seed.
    """

    out: str = "results"
    sections: tuple[Literal["layers", "training"], ...] = ("layers", "training")
    methods: tuple[str, ...] | None = None
    sizes: tuple[str, ...] = ("13x13", "14x14")
    batch: int | None = None
    rounds: int = 15
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    step_rounds: int = 5
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class Render:
    """Write page and figure again from a results JSON.

    Attributes:
        file: JSON file of ``covpool bench methods``.
    """

    file: Path


EXAMPLE = "covpool bench methods --sections '[layers]' --methods '[gap]' --rounds 3"
Arguments = Methods | Render
SUITES: dict[str, type[Arguments]] = {"methods": Methods, "render": Render}


@dataclass(frozen=True)
class Written:
    """The files written, the JSON first, and the page to print."""

    files: tuple[str, ...]
    report: str = ""


def parse(words: Sequence[str]) -> tuple[Arguments, bool]:
    """Parse the subcommand and its options."""
    from covpool.cli.parser import parse as parse_options

    suite, *rest = words or [""]
    if suite in ("-h", "--help"):
        print(_help())
        raise SystemExit(0)
    if suite not in SUITES:
        got = f"; got {suite!r}{did_you_mean(suite, SUITES)}" if suite else ""
        raise UsageError(f"covpool bench needs one of {', '.join(SUITES)}{got}")
    return parse_options(f"covpool bench {suite}", SUITES[suite], rest)


def run(arguments: Arguments) -> Written:
    """Measure and render, or render alone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if isinstance(arguments, Methods):
        return _methods(arguments)
    from covpool.bench.methods import render

    return Written(tuple(map(str, render(arguments.file))))


def text(result: Written) -> str:
    """Return the page and the paths of the files."""
    return "\n".join(([result.report] if result.report else []) + list(result.files))


def _methods(arguments: Methods) -> Written:
    from dataclasses import replace

    from covpool.bench.methods import LAYER_SCHEDULE, render, run_methods
    from covpool.bench.table import aligned
    from covpool.terminal import Progress

    path = run_methods(
        arguments.out,
        sections=arguments.sections,
        methods=arguments.methods,
        sizes=arguments.sizes,
        batch=arguments.batch,
        schedule=replace(LAYER_SCHEDULE, rounds=arguments.rounds),
        batch_sizes=arguments.batch_sizes,
        step_rounds=arguments.step_rounds,
        device=arguments.device,
        seed=arguments.seed,
        progress=Progress,
    )
    files = [path, *render(path)]
    return Written(tuple(map(str, files)), aligned(files[1].read_text(encoding="utf-8")))


def _help() -> str:
    listed = "\n".join(
        f"  {name.ljust(9)}  {(suite.__doc__ or '').partition(chr(10))[0]}" for name, suite in SUITES.items()
    )
    return (
        f"usage: covpool bench SUITE ...\n\n{listed}\n\n"
        f"covpool bench SUITE --help has the options of one.\n\nexample:\n  {EXAMPLE}"
    )
