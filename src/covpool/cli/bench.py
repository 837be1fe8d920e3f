"""``covpool bench``: see :func:`covpool.bench.run_methods`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
import logging
import sys
from dataclasses import asdict, dataclass, replace
from typing import Literal

from covpool.device import Device

EXAMPLE = "covpool bench --sections '[layers]' --methods '[gap]' --rounds 3"


@dataclass(frozen=True)
class Arguments:
    """Measure time and memory of every pooling method, next to the paper's Table 2 and Figure 3.

    It takes about 15 minutes on two cores. It writes a JSON and prints its tables.

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

    out: str = "runs/bench"
    sections: tuple[Literal["layers", "training"], ...] = ("layers", "training")
    methods: tuple[str, ...] | None = None
    sizes: tuple[str, ...] = ("13x13", "14x14")
    batch: int | None = None
    rounds: int = 15
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    step_rounds: int = 5
    device: Device = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class Written:
    """The file of results, and its tables."""

    file: str
    report: str


def run(arguments: Arguments) -> Written:
    """Measure, and write the results."""
    from covpool.bench import read_results, report, run_methods
    from covpool.bench.methods import LAYER_SCHEDULE
    from covpool.terminal import Progress

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = asdict(arguments)
    schedule = replace(LAYER_SCHEDULE, rounds=options.pop("rounds"))
    path = run_methods(**options, schedule=schedule, progress=Progress)
    return Written(str(path), report(read_results(path)))


def text(result: Written) -> str:
    """Return the tables and the path of the file."""
    return f"{result.report}\n\n{result.file}"
