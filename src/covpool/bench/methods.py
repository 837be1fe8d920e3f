"""Run the benchmark of the pooling methods, and write its results."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covpool.bench.layers import Entry, Problem, Size, chosen_entries, chosen_sizes, measure_layers
from covpool.bench.steps import BATCH_SIZES, PAPER_SETTING, Setting, measured_steps
from covpool.bench.timing import MakeProgress, Schedule, silence
from covpool.device import chosen_device
from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_whole
from covpool.provenance.origin import Results, check_schema, new_results, results_path
from covpool.storage.files import replace_file

SUITE = "methods"
SECTIONS = ("layers", "training")
# The feature maps of AlexNet and ResNet.
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
    """Measure every pooling method as a layer, and some of them in training steps of a whole network.

    Args:
        out: results folder; the file is ``<out>/<version>/methods--<machine>--<device>.json``.
        sections: ``"layers"`` (the paper's Table 2), ``"training"`` (its Figure 3), or both.
        methods: names from :func:`covpool.nn.methods` for the layers; all if None. ``"isqrt_cov"``, the
            reference, is always measured.
        sizes: feature sizes of the layers: names in :data:`covpool.bench.SIZES`, ``"C:n"``, or sizes.
        batch: images per batch of a layer; the size's own if None.
        schedule: rounds and warm-up of the layers.
        batch_sizes: batch sizes of the training steps; even, because two processes divide each batch.
        step_rounds: rounds of the training steps.
        setting: network and poolings of the training steps.
        device: device of the layers, one of :data:`covpool.device.DEVICES`; training steps always run on
            the CPU.
        seed: seed of features, gradients, weights, images and the order within rounds.
        progress: makes a progress listener for each part.

    Returns:
        The path of the JSON file.
    """
    entries = chosen_entries(methods)
    wanted = chosen_sizes(sizes, batch)
    _check(sections, batch_sizes, step_rounds)
    device = chosen_device(device).type
    arguments = {
        "sections": [section for section in SECTIONS if section in sections],
        "sizes": [size.name for size in wanted],
        "entries": {entry.label: _entry(entry) for entry in entries},
        "dtype": "float32",
        "schedule": asdict(schedule),
        "batch_sizes": list(batch_sizes),
        "step_rounds": step_rounds,
    }
    packages = ("functional", "nn", "models", "train", "bench")
    results: Results = {
        "suite": SUITE,
        **new_results(packages, arguments, device, seed),
        "layers": {},
        "training": None,
    }
    path = results_path(out, SUITE, results)
    if "layers" in sections:
        for size in wanted:
            problem = Problem(size, seed=seed, device=device)
            results["layers"][size.name] = measure_layers(problem, entries, schedule, progress)
            write_results(path, results)
    if "training" in sections:
        results["training"] = _trained(setting)
        total = step_rounds * sum(batch_sizes)
        with progress("images in steps of training") as log:
            done = 0
            for one in measured_steps(batch_sizes, step_rounds, seed, setting):
                done += one.batch
                log(done, total)
                if one.results is not None:
                    results["training"]["steps"].append(one.results)
                    write_results(path, results)
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


def read_results(path: str | Path) -> Results:
    """Read results from a JSON file, and check them against the schema."""
    results: Results = json.loads(Path(path).read_text(encoding="utf-8"))
    _check_suite(results)
    return results


def write_results(path: Path, results: Results) -> None:
    """Check results against the schema, and replace the file in one step: a crash leaves no partial file."""
    _check_suite(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(results, indent=2, ensure_ascii=False) + "\n").encode())


def _check_suite(results: Results) -> None:
    suite = results.get("suite")
    if suite != SUITE:
        raise UsageError(
            f"these are not results of covpool bench: suite is {suite!r}, not {SUITE!r}; "
            "in a checkout, python -m benchmarks.isqrt_cov renders those of isqrt_cov"
        )
    check_schema(results, "covpool.bench", SUITE)
