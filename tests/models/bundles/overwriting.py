"""A process that forks others, which overwrite a bundle without end, and kills them at random moments.

``python -m tests.models.bundles.overwriting FOLDER KILLS`` ends with code 0 if a whole bundle was there after
every kill, and tells how many different ones were seen and what the kills left beside them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from covpool.models import PooledClassifier
from covpool.models.bundle import load_model
from covpool.models.saving import save_model
from tests.models.bundles.samples import trained


def save(model: PooledClassifier, folder: Path, number: int) -> None:
    """Weights that are all one number, so that a mixture of two bundles shows."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(number)
    save_model(model, folder)


def check(folder: Path) -> int:
    """The number of the bundle; raise unless it is whole."""
    (number,) = {
        value for tensor in load_model(folder).state_dict().values() for value in tensor.unique().tolist()
    }
    return int(number)


def main(parent: Path, kills: int) -> None:
    """Kill, check, and go on from there."""
    torch.set_num_threads(1)
    folder, moments, model = parent / "model", random.Random(0), trained()
    save(model, folder, 0)
    seen, left = set(), set()
    for kill in range(kills):
        child = os.fork()
        if not child:
            for number in range(1000 * kill, 1000 * kill + 1000):
                save(model, folder, number)
        time.sleep(moments.uniform(0.1, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the process ended by itself"
        left |= {path.name for path in parent.iterdir()} - {"model"}
        seen.add(check(folder))
    print(json.dumps({"kills": kills, "seen": len(seen), "left behind": sorted(left)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
