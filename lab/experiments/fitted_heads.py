"""Train and evaluate heads with the paper's Newton-Schulz steps and with fitted ones.

    python -m lab fitted_heads DATA CACHE

DATA is a folder with ``train`` and ``test`` by class; its name is the name of the set. CACHE is a folder for
the features of a frozen EfficientNet-Lite0. Heads have the defaults of ``covpool probe``. Each head trains
with one iteration of ``TRAINED`` and is evaluated with all ``ITERATIONS``. Results of other sets in the file
are kept. Rerun the command to resume.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from covpool.data.order import number
from covpool.data.sources import open_splits
from covpool.evaluate.probe.features import Extractor, fit_head, frozen_config, head_outputs
from covpool.evaluate.probe.options import ProbeOptions
from covpool.inference.store import CachedFeatures
from covpool.models.config import ModelConfig, head_config
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from lab.record import new_record, record_file, resumed, write_record

SEEDS = 5
# Above this number of training images, heads train for 10 epochs, as in fine_grained.
MANY = 2000
BACKBONE = "tf_efficientnet_lite0"
ITERATIONS: dict[str, dict[str, Any]] = {
    "5 paper": {"iteration": "paper", "steps": 5},
    "4 fitted": {"steps": 4, "iteration": "fitted"},
    "3 fitted": {"steps": 3, "iteration": "fitted"},
    "3 paper": {"iteration": "paper", "steps": 3},
}
BASELINE = "5 paper"
TRAINED = ("5 paper", "4 fitted", "3 fitted")


class Heads:
    """Heads on the cached features of a set."""

    def __init__(self, data: Path, cache: Path) -> None:
        sets = open_splits(data)
        epochs = 10 if len(sets["train"]) > MANY else ProbeOptions.epochs
        self.options = ProbeOptions(BACKBONE, heads=("isqrt_cov",), pretrained=True, epochs=epochs)
        self.config = ModelConfig(BACKBONE, num_classes=len(sets["train"].classes))
        network = build_model(frozen_config(self.config), pretrained=True)
        extractor = Extractor(network, self.options, cache, {"features"}, torch.device("cpu"))

        def features(split: str) -> CachedFeatures:
            store = extractor.store(sets[split], lambda done, total: None)  # type: ignore[index]
            return extractor.extract(sets[split], store, _show(f"features of {split}"))  # type: ignore[index]

        self.train, self.test = features("train"), features("test")
        self.expands = extractor.model.expansion is not None

    def build(self, iteration: str) -> PooledClassifier:
        """Build the network with an iteration, from pretrained weights."""
        options = self.options
        drop_rate = options.setting("isqrt_cov").drop_rate
        config = head_config("isqrt_cov", self.config, options.dim, drop_rate, expands=self.expands)
        fields = {**vars(config), "pool_options": ITERATIONS[iteration]}
        return build_model(ModelConfig(**fields), pretrained=True)

    def row(self, iteration: str, seed: int) -> dict[str, Any]:
        """Train a head, and evaluate it with every iteration."""
        torch.manual_seed(number("weights", seed))
        model = self.build(iteration)
        fit_head(model, self.train, self.train.usable, self.options, seed, _show(f"{iteration}, seed {seed}"))
        correct = {}
        for tested in ITERATIONS:
            evaluated = self.build(tested)
            evaluated.load_state_dict(model.state_dict())
            right = [
                logits.mean(dim=0).argmax(dim=1).numpy() == self.test.labels[ids]
                for ids, logits in head_outputs(evaluated, self.test, self.test.usable)
            ]
            correct[tested] = np.packbits(np.concatenate(right)).tobytes().hex()
        return {"trained": iteration, "seed": seed, "correct": correct}


def _show(what: str) -> Any:
    def show(done: int, total: int) -> None:
        if done == total or done % max(1, total // 4) == 0:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return show


def correct(row: dict[str, Any], evaluated: str, images: int) -> np.ndarray:
    """Return whether each test image is predicted correctly."""
    packed = np.frombuffer(bytes.fromhex(row["correct"][evaluated]), dtype=np.uint8)
    return np.unpackbits(packed)[:images].astype(float)


def table(results: dict[str, Any]) -> str:
    """Return a table of accuracies, with paired differences from heads with 5 paper steps."""
    lines = [
        "| set | trained with | evaluated with | top-1 in % | difference in points (95 % interval) | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, measured in results["sets"].items():
        rows, images = measured["rows"], measured["images"]
        base = {row["seed"]: correct(row, BASELINE, images) for row in rows if row["trained"] == BASELINE}
        for trained in ITERATIONS:
            for evaluated in ITERATIONS:
                if trained not in (BASELINE, evaluated):
                    continue
                by_seed = {
                    row["seed"]: correct(row, evaluated, images) for row in rows if row["trained"] == trained
                }
                if not by_seed:
                    continue
                shares = [100 * float(right.mean()) for right in by_seed.values()]
                spread = f" ± {stdev(shares):.2f}" if len(shares) > 1 else ""
                both = sorted(by_seed.keys() & base.keys())
                cell = ""
                if both and (trained, evaluated) != (BASELINE, BASELINE):
                    per_image = np.mean([by_seed[seed] - base[seed] for seed in both], axis=0)
                    half = 196 * per_image.std() / images**0.5
                    middle = 100 * per_image.mean()
                    cell = f"{middle:+.2f} ({middle - half:+.2f} to {middle + half:+.2f})"
                cells = [name, trained, evaluated, f"{mean(shares):.2f}{spread}", cell, str(len(shares))]
                lines.append(f"| {' | '.join(cells)} |")
    note = (
        f"Frozen EfficientNet-Lite0, 224 px, d = 128, 25 epochs (10 above {MANY} images). Logits are "
        "averaged with those of the horizontal flip. Mean ± standard deviation over seeds. The interval is "
        "paired by test image, each the mean over seeds."
    )
    return "\n".join([*lines, "", note])


def main(data: Path, cache: Path, file: Path | None = None) -> None:
    """Train heads with the paper's steps and with fitted ones. Rerun the command to resume.

    Args:
        data: a data set with train and test by class.
        cache: folder of the cached features.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("fitted_heads", ("functional", "nn", "models", "data", "evaluate"))
    file = file or record_file(record)
    record = resumed(record | {"sets": {}}, file)
    heads = Heads(data, cache)
    measured = record["sets"].setdefault(data.name, {"images": len(heads.test.usable), "rows": []})
    for seed in range(SEEDS):
        for iteration in TRAINED:
            if any((row["trained"], row["seed"]) == (iteration, seed) for row in measured["rows"]):
                continue
            measured["rows"].append(heads.row(iteration, seed))
            write_record(file, record, table(record))
    print(table(record))
