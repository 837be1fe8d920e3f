"""Runs the suite, and writes its results part by part as they come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covpool.bench.methods.entries import Entry, chosen_entries
from covpool.bench.methods.layers import measure_layers
from covpool.bench.methods.steps import BATCH_SIZES, PAPER_SETTING, Setting, measured_steps
from covpool.bench.problem import Problem, Size, chosen_sizes
from covpool.bench.results import Results, check_device, new_results, write_results
from covpool.bench.timing import MakeProgress, Schedule, silence
from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_whole
from covpool.provenance.origin import results_path

SECTIONS = ("layers", "training")
# AlexNet's and ResNet's.
PAPER_SIZES = ("13x13", "14x14")
LAYER_SCHEDULE = Schedule(rounds=15, slow_seconds=0.5)
STEP_ROUNDS = 5


def run_methods(
    out: str | Path = "results",
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
    progress: MakeProgress = silence,
) -> Path:
    """Measure every method as a layer, and some in whole steps of training.

    Args:
        out: folder of results; the file is ``<out>/<version>/methods--<machine>--<device>.json``.
        sections: ``"layers"`` (Table 2) and ``"training"`` (Figure 3).
        methods: names of :func:`covpool.nn.methods` for the layers; all if None. ``"isqrt_cov"`` is
            always there.
        sizes: of the layers: names of :data:`covpool.bench.SIZES`, ``"C:n"``, or sizes themselves.
        batch: images in a layer's batch; each size's own if None.
        schedule: of the layers' rounds.
        batch_sizes: of the steps of training, divided among the processes, so even.
        step_rounds: of the steps of training.
        setting: what is trained.
        device: of the layers, ``"cpu"`` or ``"cuda"``; steps of training are timed on CPUs alone.
        seed: of the features, gradients, weights, images and the order within rounds.
        progress: makes a listener for each part.

    Returns:
        The path of the JSON file.
    """
    entries = chosen_entries(methods)
    wanted = chosen_sizes(sizes, batch)
    _check(sections, batch_sizes, step_rounds, device)
    arguments = {
        "sections": [section for section in SECTIONS if section in sections],
        "sizes": [size.name for size in wanted],
        "entries": {entry.label: _entry(entry) for entry in entries},
        "dtype": "float32",
        "schedule": asdict(schedule),
        "batch_sizes": list(batch_sizes),
        "step_rounds": step_rounds,
    }
    rooms = ("functional", "nn", "models", "train", "bench")
    results: Results = {
        **new_results("methods", rooms, arguments, device, seed),
        "layers": {},
        "training": None,
    }
    path = results_path(out, results["suite"], results)
    if "layers" in sections:
        for size in wanted:
            problem = Problem(size, seed=seed, device=device)
            results["layers"][size.name] = measure_layers(problem, entries, schedule, progress)
            write_results(path, results)
    if "training" in sections:
        results["training"] = _trained(setting)
        total = step_rounds * sum(batch_sizes)
        with progress("images in steps of training") as tell:
            done = 0
            for told in measured_steps(batch_sizes, step_rounds, seed, setting):
                done += told.batch
                tell(done, total)
                if told.results is not None:
                    results["training"]["steps"].append(told.results)
                    write_results(path, results)
    return path


def _check(sections: Collection[str], batch_sizes: Sequence[int], step_rounds: int, device: str) -> None:
    for section in sections:
        check_choice("sections", section, SECTIONS)
    check_whole("step_rounds", step_rounds)
    for size in batch_sizes:
        if size < 4 or size % 2:  # BatchNorm of the hidden layers needs two images in each process
            raise UsageError(f"batch_sizes must be even, with two images a process at least; got {size}")
    check_device(device)


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
