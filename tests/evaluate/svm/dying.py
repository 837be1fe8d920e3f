"""A process of its own: make features, and be killed when so many images are done."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from covpool.data.sources import open_images
from covpool.evaluate.svm.classifier import make_features
from covpool.inference import store
from covpool.inference.forward import Pass
from covpool.inference.store import read_content
from covpool.models.bundle import load_model
from covpool.processes import Processes


def progress(done: int, total: int) -> None:
    if done >= int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    store.SECONDS_BETWEEN_SAVES = float(sys.argv[5])
    model, images = load_model(sys.argv[2]), open_images(sys.argv[3])
    make_features(
        Path(sys.argv[1]),
        {"of": "sparrows"},
        model,
        images,
        read_content(images, lambda done, total: None),
        Pass(4, 0),
        Processes(0, 1, torch.device("cpu")),
        tell=print,
        progress=progress,
    )
