"""Measure whether a network needs the positions that exact maps credit; compare with Grad-CAM and no map.

    python -m experiments.location_maps BUNDLE DATA results/VERSION/location_maps--MACHINE--cpu [IMAGES]

BUNDLE is a trained bundle, DATA has images with a test split. The package ``grad-cam`` must be installed. See
:mod:`covpool.explain.deletion` for the measurements: less is better for deletion, more for insertion. All
maps are of the predicted class, resized to the image in the same way.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.durable import replace_file
from covpool.explain.deletion import areas, centre_first
from covpool.explain.evidence import explain
from covpool.explain.explaining import some_images
from covpool.explain.figures import resized
from covpool.models.bundle import load_model, read_card
from covpool.models.model import PooledClassifier
from covpool.provenance.results import new_results

SEED, IMAGES = 0, 205
EXACT, GRAD_CAM, CENTRE, RANDOM = "exact map", "Grad-CAM", "centre first", "random places"


def run(bundle: Path, data: Path, count: int) -> dict[str, Any]:
    """Every map of every image; images are spread over the test split."""
    model = load_model(bundle).eval()
    rows: list[dict[str, list[float]]] = []
    for image in _images(model, data, count):
        with torch.inference_mode():
            label = int(model(image[None]).argmax())
        found = areas(model, image, label, _orders(model, image, label, len(rows)))
        rows.append({name: [one.deletion, one.insertion] for name, one in found.items()})
        print(f"{len(rows)} of {count} images", file=sys.stderr, flush=True)
    rooms = ("functional", "nn", "models", "data", "explain", "../../experiments")
    card = read_card(bundle)
    about = {
        "model": card.config.backbone,
        "pool": card.config.pool,
        "dim": card.config.dim,
        "images": len(rows),
    }
    return {"experiment": "location_maps", **new_results(rooms, about, "cpu", SEED), "rows": rows}


def _images(model: PooledClassifier, data: Path, count: int) -> Iterator[Tensor]:
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    for image in some_images(str(data), count):
        yield transform(decode(image.content))


def _orders(model: PooledClassifier, image: Tensor, label: int, number: int) -> dict[str, Tensor]:
    """Maps of the image's size; the one by chance has as many places as the exact one."""
    height, width = image.shape[1:]
    (exact,) = explain(model, image, [label])
    chance = torch.rand(exact.places.shape, generator=torch.Generator().manual_seed(number))
    return {
        EXACT: _laid_over(exact.places, width, height),
        GRAD_CAM: torch.from_numpy(_grad_cam(model, image, label)),
        CENTRE: centre_first(height, width),
        RANDOM: _laid_over(chance, width, height),
    }


def _laid_over(places: Tensor, width: int, height: int) -> Tensor:
    return torch.from_numpy(resized(places.numpy(), (width, height)).copy())


def _grad_cam(model: PooledClassifier, image: Tensor, label: int) -> Any:
    """Of the features that are pooled: the last block of the backbone."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    blocks = getattr(model.backbone, "blocks", None) or model.backbone.layer4
    with GradCAM(model=model, target_layers=[blocks[-1]]) as cam:
        maps = cam(input_tensor=image[None], targets=[ClassifierOutputTarget(label)])
    return maps[0]


def table(results: dict[str, Any]) -> str:
    """For a person, as Markdown."""
    about = results["arguments"]
    lines = [
        f"{about['images']} test images, {about['model']} with {about['pool']}: the area under the "
        "probability of the class against the share of the image that is blurred away (deletion, less is "
        "better) or brought in (insertion, more is better), mean ± standard error; in how many images of a "
        "hundred the exact map is the better one.",
        "",
        "| order of places | deletion | insertion | exact is better: deletion | insertion |",
        "|---|---|---|---|---|",
    ]
    for name in results["rows"][0]:
        cells = [_mean([row[name][part] for row in results["rows"]]) for part in (0, 1)]
        wins = ["", ""] if name == EXACT else [_wins(results["rows"], name, part) for part in (0, 1)]
        lines.append(f"| {' | '.join([name, *cells, *wins])} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def _wins(rows: list[dict[str, list[float]]], name: str, part: int) -> str:
    sign = -1 if part == 0 else 1
    won = [sign * (row[EXACT][part] - row[name][part]) > 0 for row in rows]
    return f"{100 * statistics.mean(won):.0f}"


def main(bundle: str, data: str, results: str, count: str = str(IMAGES)) -> None:
    """Measure, and write the results."""
    made = run(Path(bundle), Path(data), int(count))
    replace_file(Path(results).with_suffix(".json"), (json.dumps(made, indent=1) + "\n").encode())
    replace_file(Path(results).with_suffix(".md"), f"{table(made)}\n".encode())
    print(table(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
