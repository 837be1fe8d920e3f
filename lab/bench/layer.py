"""Time the layer that people use, and what it adds to a training step and to an answer.

    python -m lab layer            # about 40 minutes on two idle cores; rerun it to resume
    python -m lab figures layer    # the tables in README.md and docs/benchmarks.md

The layer is ``CovPool`` at its defaults without the reduction: features to the upper triangle of the root.
It is compared with its matrix products alone (:mod:`lab.bench.bare_engine`), and with the paper's equations
followed by the triangle. The networks are a backbone with ``isqrt_cov`` and the same backbone with ``gap``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from covpool.device import chosen_device
from covpool.functional import triu_vec
from covpool.models.create import create_model
from covpool.nn import CovPool
from lab.bench.bare_engine import recorded_products, replay, replayable
from lab.bench.contenders import plain_isqrt_cov, value_and_gradient
from lab.bench.layers import SIZES, Problem, chosen_sizes
from lab.bench.table import machine_words, table
from lab.bench.timing import Schedule, time_interleaved, timing_figures
from lab.record import (
    RESULTS,
    ROOT,
    SAME,
    committed_file,
    new_record,
    read_record,
    record_file,
    resumed,
    with_block,
    write_record,
)

NAME = "layer"
SOURCES = ("functional", "nn", "lab/bench")
IMAGE_SIZES = (224, 448)
BATCHES = (1, 16, 64)
CLASSES = 1000
# A training step keeps the activations of every layer: 64 images of 448 pixels need 20 GB and more.
MOST_TRAINING_PIXELS = 64 * 224**2
NETWORKS = {"resnet50": "ResNet-50", "efficientnet_lite0": "EfficientNet-Lite0"}
# The rows on the front page.
FRONT_SIZES, FRONT_BATCHES = (224,), (16, 64)

log = logging.getLogger(__name__)


def layer_runs(problem: Problem) -> dict[str, Callable[[], object]]:
    """Return value and gradient of the layer, of its products alone, and of the paper's equations."""
    size = problem.size
    layer = CovPool(size.channels, dim=None, layout="channels_first").to(problem.device)
    upstream = triu_vec(problem.upstream).contiguous()
    ours = partial(value_and_gradient, layer, problem.features, upstream)
    factors = replayable(recorded_products(ours), problem)
    paper = partial(
        value_and_gradient,
        lambda x: triu_vec(plain_isqrt_cov(x, steps=problem.steps)),
        problem.features,
        upstream,
    )
    return {"bare": partial(replay, factors), "layer": ours, "paper": paper}


def step_runs(
    backbone: str, image_size: int, batch: int, what: str, device: str
) -> dict[str, Callable[[], object]]:
    """Return a training step, or the scores of a batch, of a backbone with both poolings."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)
    runs: dict[str, Callable[[], object]] = {}
    for pool in ("gap", "isqrt_cov"):
        model = create_model(backbone, pool=pool, num_classes=CLASSES, keep_resolution=False)
        model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if what == "inference":
            runs[pool] = partial(torch.inference_mode()(model.eval()), images)
        else:
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            runs[pool] = partial(_step, model, optimizer, images, labels)
    return runs


def _step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def main(
    out: Path = RESULTS,
    threads: tuple[int, ...] = (1, 2),
    rounds: int = 30,
    step_rounds: int = 7,
    steps: bool = True,
    device: Literal["cpu", "cuda"] = "cpu",
    again: bool = False,
) -> Path:
    """Time the layer against its products and the paper's equations, and networks with it against gap.

    Args:
        out: results folder.
        threads: numbers of threads for the layer; networks use the last one.
        rounds: timed rounds of the layer.
        step_rounds: timed rounds of the networks.
        steps: time the networks too.
        device: device.
        again: measure again what an earlier run has measured.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen_device(device)
    schedule, step_schedule = Schedule(rounds=rounds), Schedule(rounds=step_rounds, warmup=1)
    arguments = {"schedule": asdict(schedule), "step_schedule": asdict(step_schedule), "dtype": "float32"}
    record = new_record(NAME, SOURCES, arguments, device=device, seed=0) | {"layer": {}, "networks": {}}
    file = record_file(record, out)
    record = resumed(record, file, same=(*SAME, "schedule", "step_schedule"), again=again)

    def measure(part: str, name: str, runs: Callable[[], Mapping[str, Any]], schedule: Schedule) -> None:
        if name in record[part]:
            return
        timings = time_interleaved(
            ready := runs(), reference=next(iter(ready)), schedule=schedule, seed=0, device=device
        )
        record[part][name] = {run: timing_figures(timing) for run, timing in timings.items()}
        log.info(
            "%s: %s", name, ", ".join(f"{run} {timing.ratio.median:.3f}" for run, timing in timings.items())
        )
        write_record(file, record, summary(record))

    for count, size in product(threads, chosen_sizes(None)):
        torch.set_num_threads(count)
        problem = Problem(size, device=device)
        measure("layer", f"{size.name}, {count} threads", partial(layer_runs, problem), schedule)
    for backbone, pixels, batch, what in product(
        NETWORKS if steps else (), IMAGE_SIZES, BATCHES, ("inference", "training")
    ):
        if what == "training" and batch * pixels**2 > MOST_TRAINING_PIXELS and device == "cpu":
            continue
        name = f"{what}, {backbone}, {pixels} pixels, batch {batch}"
        measure("networks", name, partial(step_runs, backbone, pixels, batch, what, device), step_schedule)
    print(file)
    return file


def summary(record: Mapping[str, Any]) -> str:
    """Return the results as Markdown tables."""
    cells = []
    for name, runs in record["layer"].items():
        size, _, threads = name.partition(", ")
        shape = SIZES[size]
        layer, paper = (runs[run]["ratio"]["median"] for run in ("layer", "paper"))
        features = f"{size} ({shape.channels}×{shape.positions}, batch {shape.batch})"
        cells.append([features, threads.split()[0], f"{layer:.2f}", f"{paper / layer:.1f}"])
    titles = [
        "features (channels × positions)",
        "threads",
        "time of the layer / time of its matrix products",
        "time of the paper's equations / time of the layer",
    ]
    words = (
        "Forward and backward pass of the layer `CovPool` without channel reduction, float32, "
        f"{machine_words(record)}; medians:"
    )
    lines = [words, "", table(titles, cells)]
    networks = network_table(record)
    return "\n".join([*lines, "", networks] if networks else lines)


def network_table(
    record: Mapping[str, Any], sizes: tuple[int, ...] = IMAGE_SIZES, batches: tuple[int, ...] = BATCHES
) -> str:
    """Return the time that covariance pooling adds to networks; empty if none is measured."""
    rows = []
    for (backbone, title), pixels, batch in product(NETWORKS.items(), sizes, batches):
        names = [f"{what}, {backbone}, {pixels} pixels, batch {batch}" for what in ("training", "inference")]
        runs = [record["networks"].get(name) for name in names]
        if any(runs):
            rows.append([title, str(pixels), str(batch), *(added(run) for run in runs)])
    if not rows:
        return ""
    words = (
        "Time that covariance pooling (d = 256 channels) adds to a network with average pooling: "
        f"{CLASSES:,} classes, float32, {record['machine']['cores']} cores of a {record['device'].upper()}. "
        "The stride of the last stage is unchanged (`keep_resolution=False`). Values are medians, with "
        "quartiles in brackets. If the brackets include zero, the added time is within the noise.\n\n"
    )
    titles = [
        "network",
        "image size, px",
        "batch size",
        "time added to a training step",
        "time added to inference",
    ]
    return f"{words}{table(titles, rows)}"


def added(runs: Mapping[str, Any] | None) -> str:
    """Return the time that isqrt_cov adds to gap, in percent, with its quartiles."""
    if runs is None:
        return "not run"
    ratio = runs["isqrt_cov"]["ratio"]
    median, low, high = (round(100 * (ratio[name] - 1)) for name in ("median", "q1", "q3"))
    return f"{median:+d} % ({low:+d} to {high:+d})"


def write_pages(
    file: Path | None = None, docs: Path = ROOT / "docs", front: Path = ROOT / "README.md"
) -> list[Path]:
    """Write the tables into the pages.

    Args:
        file: results of ``python -m lab layer``; the committed ones if not given.
        docs: folder with benchmarks.md, which has marks.
        front: front page with marks.
    """
    record = read_record(file or committed_file(NAME), NAME)
    blocks = {
        docs / "benchmarks.md": summary(record),
        front: network_table(record, FRONT_SIZES, FRONT_BATCHES),
    }
    for page, block in blocks.items():
        page.write_text(with_block(page.read_text(encoding="utf-8"), NAME, block), encoding="utf-8")
    return [*blocks]
