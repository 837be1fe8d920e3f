"""Images a second of one core: decoding, and networks. Of its time, so that other processes count little."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from covpool.bench.results import new_results
from covpool.data.order import permutation
from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing
from covpool.device import autocast
from covpool.inference.work import Decoder
from covpool.models.config import ModelConfig
from covpool.models.create import create_model
from covpool.models.plan import plan

SIZES = (224, 448)
PRECISIONS = ("float32", "bfloat16")
BACKBONE, DIM = "resnet50", 256
PHOTOS, BATCH, ROUNDS, SEED = 200, 4, 5, 0


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
        **new_results("bulk", ("data", "models", "nn", "functional", "evaluate"), arguments, "cpu", SEED),
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
