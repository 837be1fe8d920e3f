"""Run the benchmark of the pooling methods, and write its results."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from covpool.arguments import Device, check_choice, check_whole
from covpool.device import chosen_device
from covpool.errors import UsageError
from covpool.terminal import Progress
from lab.bench.layers import Entry, Problem, Size, chosen_entries, chosen_sizes, measure_layers
from lab.bench.steps import BATCH_SIZES, PAPER_SETTING, Setting, measured_steps
from lab.bench.table import report
from lab.bench.timing import MakeProgress, Schedule, silence
from lab.record import RESULTS, SAME, new_record, read_record, record_file, resumed, write_record

SUITE = "methods"
SECTIONS = ("layers", "training")
# The feature maps of AlexNet and ResNet.
PAPER_SIZES = ("13x13", "14x14")
LAYER_SCHEDULE = Schedule(rounds=15, slow_seconds=0.5)
STEP_ROUNDS = 5


def run_methods(
    out: str | Path = RESULTS,
    *,
    sections: Collection[str] = SECTIONS,
    methods: Collection[str] | None = None,
    sizes: Iterable[str | Size] = PAPER_SIZES,
    batch: int | None = None,
    schedule: Schedule = LAYER_SCHEDULE,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    step_rounds: int = STEP_ROUNDS,
    setting: Setting = PAPER_SETTING,
    device: str = "cpu",
    seed: int = 0,
    again: bool = False,
    progress: MakeProgress = silence,
) -> Path:
    """Measure every pooling method as a layer, and some of them in training steps of a whole network.

    Args:
        out: results folder; the file is ``<out>/<version>/methods--<machine>--<device>.json``.
        sections: ``"layers"`` (the paper's Table 2), ``"training"`` (its Figure 3), or both.
        methods: names from :func:`covpool.nn.methods` for the layers; all if None. ``"isqrt_cov"``, the
            reference, is always measured.
        sizes: feature sizes of the layers: names in :data:`lab.bench.SIZES`, ``"C:n"``, or sizes.
        batch: images per batch of a layer; the size's own if None.
        schedule: rounds and warm-up of the layers.
        batch_sizes: batch sizes of the training steps; even, because two processes divide each batch.
        step_rounds: rounds of the training steps.
        setting: network and poolings of the training steps.
        device: device of the layers, one of :data:`covpool.device.DEVICES`; training steps always run on
            the CPU.
        seed: seed of features, gradients, weights, images and the order within rounds.
        again: measure everything again; otherwise the parts in an earlier file of the same run are kept.
        progress: makes a progress listener for each part.

    Returns:
        The path of the JSON file.
    """
    entries = chosen_entries(methods)
    chosen = chosen_sizes(sizes, batch)
    _check(sections, batch_sizes, step_rounds)
    device = chosen_device(device).type
    arguments = {
        "sections": [section for section in SECTIONS if section in sections],
        "sizes": [size.name for size in chosen],
        "entries": {entry.label: _entry(entry) for entry in entries},
        "dtype": "float32",
        "schedule": asdict(schedule),
        "batch_sizes": list(batch_sizes),
        "step_rounds": step_rounds,
    }
    packages = ("functional", "nn", "models", "training", "lab/bench")
    record = new_record(SUITE, packages, arguments, device=device, seed=seed) | {
        "layers": {},
        "training": None,
    }
    path = record_file(record, out)
    record = resumed(record, path, same=(*SAME, *arguments), again=again)
    if "layers" in sections:
        for size in chosen:
            if size.is_that_of(record["layers"].get(size.name)):
                continue
            problem = Problem(size, seed=seed, device=device)
            record["layers"][size.name] = measure_layers(problem, entries, schedule, progress)
            write_record(path, record)
    if "training" in sections:
        record["training"] = record["training"] or _trained(setting)
        finished = {step["batch"] for step in record["training"]["steps"]}
        left = [size for size in batch_sizes if size not in finished]
        with progress("images in steps of training") as log:
            done = 0
            for step in measured_steps(left, step_rounds, seed, setting):
                done += step.batch
                log(done, step_rounds * sum(left))
                if step.results is not None:
                    record["training"]["steps"].append(step.results)
                    write_record(path, record)
    return path


def _check(sections: Collection[str], batch_sizes: Sequence[int], step_rounds: int) -> None:
    for section in sections:
        check_choice("sections", section, SECTIONS)
    check_whole("step_rounds", step_rounds)
    for size in batch_sizes:
        if size < 4 or size % 2:  # BatchNorm of the hidden layers needs two images in each process
            raise UsageError(f"batch_sizes must be even and at least 4; got {size}")


def _entry(entry: Entry) -> dict[str, Any]:
    return {"method": entry.method, "options": dict(entry.options), "summary": entry.summary}


def _trained(setting: Setting) -> dict[str, Any]:
    return {
        "network": "alexnet",
        "image_size": setting.image_size,
        "classes": setting.classes,
        "hidden": list(setting.hidden),
        "threads_per_process": 1,
        "steps": [],
    }


def main(
    out: Path = RESULTS,
    sections: tuple[Literal["layers", "training"], ...] = ("layers", "training"),
    methods: tuple[str, ...] | None = None,
    sizes: tuple[str, ...] = PAPER_SIZES,
    batch: int | None = None,
    rounds: int = LAYER_SCHEDULE.rounds,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    step_rounds: int = STEP_ROUNDS,
    device: Device = "cpu",
    seed: int = 0,
    again: bool = False,
) -> None:
    """Measure time and memory of every pooling method, next to the paper's Table 2 and Figure 3.

    It takes about 15 minutes on two cores, and prints the tables. Rerun the command to resume.

    Args:
        out: results folder.
        sections: parts to measure: layers (Table 2), training (Figure 3).
        methods: pooling methods, as [gap,mpn_cov]; all if not given. isqrt_cov is always measured.
        sizes: feature sizes of the layers: 13x13, 14x14, 7x7, vit, 28x28, or channels and positions, as
            64:49.
        batch: images per batch of a layer; the size's own if not given.
        rounds: timed rounds of the layers.
        batch_sizes: batch sizes of the training steps.
        step_rounds: timed rounds of the training steps.
        device: device of the layers; training steps always run on the CPU.
        seed: random seed.
        again: measure again what an earlier run has measured.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    path = run_methods(
        out,
        sections=sections,
        methods=methods,
        sizes=sizes,
        batch=batch,
        schedule=replace(LAYER_SCHEDULE, rounds=rounds),
        batch_sizes=batch_sizes,
        step_rounds=step_rounds,
        device=device,
        seed=seed,
        again=again,
        progress=Progress,
    )
    print(report(read_record(path)), path, sep="\n\n")
