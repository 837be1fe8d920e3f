"""``covpool bench``: see :func:`covpool.bench.run_methods` and its neighbours, a dataclass for each suite."""

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
    """Time and memory of every pooling method beside the paper's figures: its Table 2 and Figure 3.

    About 15 minutes on two cores. Written are a JSON of figures, a page and a picture; the page is printed.

    Attributes:
        out: the folder of results.
        sections: ``layers`` is Table 2, ``training`` is Figure 3; as ``[layers]``, both if not given.
        methods: as ``[gap,mpn_cov]``; all if not given. isqrt_cov is always there, for comparison.
        sizes: of the layers' features, as ``[13x13]``: 13x13, 14x14, 7x7, vit, 28x28; or channels and
            positions, as ``["64:49"]``.
        batch: images in a layer's batch; each size's own if not given.
        rounds: of the layers.
        batch_sizes: of the steps of training, as ``[8,16]``.
        step_rounds: of the steps of training.
        device: of the layers; steps of training are timed on CPUs alone.
        seed: of all that is random.
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
class IsqrtCov:
    """Time, memory and rounding of isqrt_cov against all that one would use in its place.

    Attributes:
        out: the folder of results.
        sizes: of the features, as ``[13x13]``: 13x13, 14x14, 7x7, vit, 28x28; or channels and positions, as
            ``["64:49"]``. All that have a name if not given.
        batch: images in a batch; each size's own if not given.
        rounds: that are timed.
        compiled: whether to time what torch.compile makes of it too.
        resume: keep the sizes that are there already.
        device: to run on.
        seed: of all that is random.
    """

    out: str = "results"
    sizes: tuple[str, ...] | None = None
    batch: int | None = None
    rounds: int = 30
    compiled: bool = True
    resume: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class Training:
    """What the loop of training costs beside a bare one, shards beside a folder, two processes beside one.

    Attributes:
        images: a collection of images with a train split.
        out: the folder of results.
        rounds: of turns.
    """

    images: Path
    out: str = "results"
    rounds: int = 15


@dataclass(frozen=True)
class Render:
    """Draw table and picture of results anew, from their JSON alone.

    Attributes:
        file: the JSON, of methods or isqrt_cov.
        page: a Markdown page with benchmark marks, to write the summary of isqrt_cov into.
    """

    file: Path
    page: Path | None = None


EXAMPLE = "covpool bench methods --sections '[layers]' --methods '[gap]' --rounds 3"
Arguments = Methods | IsqrtCov | Training | Render
SUITES: dict[str, type[Arguments]] = {
    "methods": Methods,
    "isqrt_cov": IsqrtCov,
    "training": Training,
    "render": Render,
}


@dataclass(frozen=True)
class Written:
    """The files, the JSON first, and a report for reading at once, where there is one."""

    files: tuple[str, ...]
    report: str = ""


def parse(words: Sequence[str]) -> tuple[Arguments, bool]:
    """The suite, and what is asked of it."""
    from covpool.cli.parser import parse as parse_options

    suite, *rest = words or [""]
    if suite in ("-h", "--help"):
        print(_help())
        raise SystemExit(0)
    if suite not in SUITES:
        got = f"; got {suite!r}{did_you_mean(suite, SUITES)}" if suite else ""
        raise UsageError(f"say which: {', '.join(SUITES)}{got}")
    return parse_options(f"covpool bench {suite}", SUITES[suite], rest)


def run(arguments: Arguments) -> Written:
    """Measure and draw, or draw alone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if isinstance(arguments, Methods):
        return _methods(arguments)
    if isinstance(arguments, IsqrtCov):
        return _isqrt_cov(arguments)
    return _training(arguments) if isinstance(arguments, Training) else _render(arguments)


def text(result: Written) -> str:
    """The report, and where it is."""
    return "\n".join(([result.report] if result.report else []) + list(result.files))


def _methods(arguments: Methods) -> Written:
    from dataclasses import replace

    from covpool.bench import render, run_methods
    from covpool.bench.cells import aligned
    from covpool.bench.methods.suite import LAYER_SCHEDULE
    from covpool.progress import Progress

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


def _isqrt_cov(arguments: IsqrtCov) -> Written:
    from covpool.bench import CONTENDERS, Schedule, render, run_isqrt_cov
    from covpool.progress import Progress

    path = run_isqrt_cov(
        arguments.out,
        sizes=arguments.sizes,
        batch=arguments.batch,
        contenders=[name for name in CONTENDERS if arguments.compiled or name != "compiled"],
        schedule=Schedule(rounds=arguments.rounds),
        device=arguments.device,
        seed=arguments.seed,
        resume=arguments.resume,
        progress=Progress,
    )
    return Written((str(path), *map(str, render(path))))


def _training(arguments: Training) -> Written:
    from covpool.bench.training import run_training

    return Written((str(run_training(arguments.images, arguments.out, arguments.rounds)),))


def _render(arguments: Render) -> Written:
    from covpool.bench import render, summary_into

    written = render(arguments.file)
    if arguments.page is not None:
        written.append(summary_into(arguments.page, arguments.file))
    return Written(tuple(map(str, written)))


def _help() -> str:
    listed = "\n".join(
        f"  {name.ljust(9)}  {(suite.__doc__ or '').partition(chr(10))[0]}" for name, suite in SUITES.items()
    )
    return (
        f"usage: covpool bench SUITE ...\n\n{listed}\n\n"
        f"covpool bench SUITE --help has the options of one.\n\nexample:\n  {EXAMPLE}"
    )
