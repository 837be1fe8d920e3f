"""Measure decoding and inference rates on one core, and compute the cost of a billion images from them.

    python -m lab bulk PHOTOS

PHOTOS is a folder of photographs. The experiment writes a JSON file and the tables of docs/scale.md. Rates
are per second of CPU time, so other processes hardly affect them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from covpool.data.order import permutation
from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing
from covpool.device import autocast
from covpool.inference.work import Decoder
from covpool.models.config import ModelConfig
from covpool.models.create import create_model
from covpool.models.plan import plan
from lab.record import new_record, record_file, write_record

SIZES = (224, 448)
PRECISIONS = ("float32", "bfloat16")
BACKBONE, DIM = "resnet50", 256
PHOTOS, BATCH, ROUNDS, SEED = 200, 4, 5, 0
IMAGES = 10**9
ROWS_PER_FILE = 1024
SHARD_BYTES = 256 * 10**6  # as covpool shard writes them
DIMS, PROJECTED = (64, 128, 256), 512
# Requests/s to one prefix of S3, by its documentation.
GETS, PUTS = 5500, 3500
# Peak of an A100 in bfloat16 (data sheet), and the fraction that a convolutional network is assumed to reach.
PEAK_FLOPS, UTILISATION = 312e12, 0.1


def run(photos: Path) -> dict[str, Any]:
    """Measure on photographs in a folder; the rounds of all measurements are interleaved."""
    torch.set_num_threads(1)
    files = _some_files(photos)
    timed = {f"decode {size}": (_decoding(files, size), len(files)) for size in SIZES}
    for size in SIZES:
        forward = _network(size)
        for precision in PRECISIONS:
            timed[f"{BACKBONE} {size} {precision}"] = (_calling(forward, precision), BATCH)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, (act, _) in timed.items():
            started = time.process_time()
            act()
            seconds[name].append(time.process_time() - started)
    arguments = {"photos": len(files), "batch": BATCH, "rounds": ROUNDS, "dim": DIM}
    return {
        **new_record("bulk", ("data", "models", "nn", "functional", "evaluate"), arguments, seed=SEED),
        "images a core-second": {name: timed[name][1] / median(took) for name, took in seconds.items()},
        "bytes an image": round(sum(map(len, files)) / len(files)),
        "forward FLOPs": {str(size): _flops(size) for size in SIZES},
    }


def _some_files(photos: Path) -> list[bytes]:
    images = open_unlabeled(photos)
    return [images.read(i) for i in permutation(len(images), "photographs", SEED)[:PHOTOS].tolist()]


def _decoding(files: list[bytes], size: int) -> Callable[[], object]:
    decoder = Decoder(Preprocessing(size))
    return lambda: [decoder(data) for data in files]


def _network(size: int) -> Callable[[], object]:
    model = create_model(BACKBONE, dim=DIM, num_classes=0, image_size=size).eval()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(BATCH, 3, size, size).contiguous(memory_format=torch.channels_last)
    return lambda: model(images)


def _calling(forward: Callable[[], object], precision: str) -> Callable[[], object]:
    def act() -> None:
        with torch.inference_mode(), autocast(torch.device("cpu"), precision):
            forward()

    return act


def _flops(size: int) -> int:
    config = ModelConfig(BACKBONE, num_classes=0, dim=DIM, image_size=size)
    return plan(config, batch_size=1).total.forward_flops


def table(results: dict[str, Any]) -> str:
    """Return all tables, one below the other."""
    return "\n\n".join([storage(), hours(results), requests(results)])


def storage() -> str:
    """Return the table of the storage of vectors."""
    lengths = [(f"d = {d}", d * (d + 1) // 2) for d in DIMS] + [(f"projected to {PROJECTED}", PROJECTED)]
    rows = [
        (name, f"{length:,}", *(f"{IMAGES * length * size / 1e12:,.1f} TB" for size in (4, 2)))
        for name, length in lengths
    ]
    return _markdown(("vector", "values", "float32", "float16"), rows)


def hours(results: dict[str, Any]) -> str:
    """Return the table of core-hours and GPU-hours."""
    rows = []
    for name, rate in results["images a core-second"].items():
        rows.append((name, f"{rate:.1f} images/s per core", f"{core_hours(rate):,.0f} core-hours"))
    for size in SIZES:
        flops, decoded = (
            results["forward FLOPs"][str(size)],
            results["images a core-second"][f"decode {size}"],
        )
        rate = PEAK_FLOPS * UTILISATION / flops
        rates = f"{flops / 1e9:.1f} GFLOPs, {rate:,.0f} images/s, fed by {math.ceil(rate / decoded)} cores"
        rows.append((f"{BACKBONE} {size} on an A100, estimate", rates, f"{gpu_hours(flops):,.0f} GPU-hours"))
    return _markdown(("task", "rate", "a billion images"), rows)


def requests(results: dict[str, Any]) -> str:
    """Return the table of requests to object storage, with their time at its rate limits."""
    size = results["bytes an image"]
    shards = math.ceil(IMAGES * size / SHARD_BYTES)
    a_shard = SHARD_BYTES // size
    files = shards * math.ceil(a_shard / ROWS_PER_FILE)
    counts = [
        ("GET, one per image", IMAGES, GETS),
        (f"GET, shards of {SHARD_BYTES // 10**6} MB and their indexes", 2 * shards, GETS),
        (f"PUT, files of {ROWS_PER_FILE} rows or fewer", files, PUTS),
    ]
    rows = [(what, f"{count:,}", f"{limit:,}/s", _duration(count / limit)) for what, count, limit in counts]
    return _markdown(("requests", "count", "limit", "time at the limit"), rows)


def core_hours(rate: float) -> float:
    """Return the core-hours of a billion images at a rate in images/s per core."""
    return IMAGES / rate / 3600


def gpu_hours(flops: float) -> float:
    """Return the estimated GPU-hours of a billion images, from the FLOPs of one."""
    return IMAGES * flops / (PEAK_FLOPS * UTILISATION) / 3600


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(photos: Path, file: Path | None = None) -> None:
    """Measure decoding and inference rates of one core.

    Args:
        photos: folder of photographs.
        file: results file; by default that of this machine in results/.
    """
    results = run(photos)
    write_record(file or record_file(results), results, table(results))
    print(table(results))
