"""``python -m covpool.bench isqrt_cov | render``: a thin door to the functions of this package."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from covpool.bench import CONTENDERS, SIZES, Schedule, render, run_isqrt_cov, summary_into


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = _parser().parse_args(arguments)
    try:
        written = _render(options) if options.command == "render" else _measure(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(written))
    return 0


def _measure(options: argparse.Namespace) -> list[str]:
    schedule = Schedule()
    if options.repetitions is not None:
        schedule = replace(schedule, rounds=options.repetitions)
    path = run_isqrt_cov(
        options.out,
        sizes=options.sizes,
        batch=options.batch,
        contenders=[name for name in CONTENDERS if options.compiled or name != "compiled"],
        schedule=schedule,
        device=options.device,
        seed=options.seed,
        resume=options.resume,
    )
    return [str(path), *(str(written) for written in render(path))]


def _render(options: argparse.Namespace) -> list[str]:
    written = render(options.file)
    if options.page is not None:
        written.append(summary_into(options.page, options.file))
    return [str(path) for path in written]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m covpool.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    suite = commands.add_parser("isqrt_cov", help="time isqrt_cov against its rivals")
    suite.add_argument("--out", default="results", help="folder of results (default: %(default)s)")
    suite.add_argument("--sizes", nargs="+", help=f"any of {', '.join(SIZES)}, or C:n (default: the named)")
    suite.add_argument("--batch", type=int, help="images in a batch (default: each size's own)")
    suite.add_argument("--repetitions", type=int, help=f"timed rounds (default: {Schedule.rounds})")
    suite.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    suite.add_argument("--seed", type=int, default=0)
    suite.add_argument("--no-compiled", dest="compiled", action="store_false", help="leave torch.compile out")
    suite.add_argument("--resume", action="store_true", help="keep the sizes that are already there")
    drawing = commands.add_parser("render", help="redraw table and plot from a JSON of results")
    drawing.add_argument("file")
    drawing.add_argument("--page", help="a Markdown page with benchmark marks to write the summary into")
    return parser


if __name__ == "__main__":
    sys.exit(main())
