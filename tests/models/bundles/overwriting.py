"""Fork processes that overwrite a bundle endlessly, and kill them at random moments.

``python -m tests.models.bundles.overwriting FOLDER KILLS`` exits with code 0 if a complete bundle was there
after every kill. It prints the number of different bundles seen and the names of other files that the kills
left behind.
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
    """Save a bundle whose weights all have one value, so that a mix of two bundles is detected."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(number)
    save_model(model, folder)


def check(folder: Path) -> int:
    """Return the number of the bundle; raise an error unless the bundle is complete."""
    (number,) = {
        value for tensor in load_model(folder).state_dict().values() for value in tensor.unique().tolist()
    }
    return int(number)


def main(parent: Path, kills: int) -> None:
    """Kill a process, check the bundle, and repeat."""
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
