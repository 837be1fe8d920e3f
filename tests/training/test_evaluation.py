"""Evaluation on several processes is bit-identical to evaluation on one."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import TINY10, needs_tiny10

COUNT = 437  # not a multiple of 3, 64 or 3 times 64


def evaluate(group: dict[str, str], world_size: int, out: Path) -> None:
    import os

    os.environ |= group
    import torch

    torch.set_num_threads(1)
    from covpool.data.loader import EvaluationLoader
    from covpool.data.sources import open_images
    from covpool.data.transforms import Preprocessing, evaluation_transform
    from covpool.inference.forward import Forward
    from covpool.models import create_model
    from covpool.processes import joined_processes
    from covpool.training.metrics import measure, predict
    from covpool.training.splits import split_off

    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=10, image_size=64)
    images = split_off(open_images(TINY10, "val"), COUNT / 500)[1]
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    with joined_processes("cpu") as processes:
        loader = EvaluationLoader(
            images, transform, batch_size=64, rank=processes.rank, world_size=processes.world_size
        )
        found = predict(Forward(model, device=processes.device).run(loader), processes)
        assert found is not None
        result = measure(found[0], 10), vars(found[0])
        (out / f"{world_size}-{processes.rank}.pickle").write_bytes(pickle.dumps(result))


def on(world_size: int, out: Path) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        context.Process(target=evaluate, args=({**group, "RANK": str(rank)}, world_size, out))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    return [pickle.loads((out / f"{world_size}-{rank}.pickle").read_bytes()) for rank in range(world_size)]


@needs_tiny10
@pytest.mark.slow
def test_three_processes_measure_what_one_does(tmp_path: Path) -> None:
    ((metrics, predictions),) = on(1, tmp_path)
    assert metrics["images"] == COUNT
    assert predictions["ids"].tolist() == list(range(COUNT))
    assert 0 < metrics["top1"] < 0.4  # near chance: the network is untrained
    for others, theirs in on(3, tmp_path):
        assert others == metrics
        for name, column in predictions.items():
            np.testing.assert_array_equal(theirs[name], column, err_msg=name)
