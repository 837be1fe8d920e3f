"""Compare exact evidence maps with Grad-CAM and with orders that ignore the image, by deletion and insertion.

    python -m lab location_maps BUNDLE DATA

BUNDLE is a trained bundle, DATA has images with a test split. The package ``grad-cam`` must be installed. All
maps are of the predicted class, resized to the image in the same way.

Deletion blurs positions, the highest first, and follows the probability of the class: a smaller area under
the curve is better. Insertion restores positions of a blurred image: a larger area is better. Reference:
V. Petsiuk, A. Das, K. Saenko, "RISE", BMVC 2018.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.explain.evidence import evidence_maps
from covpool.explain.evidence_figures import resized
from covpool.explain.explaining import some_images
from covpool.models.bundle import load_model, read_card
from covpool.models.model import PooledClassifier
from lab.record import new_record, record_file, write_record

SEED, IMAGES = 0, 205
# Fractions of the image at which the probability is measured, and the blur relative to the image size.
SHARES = tuple(i / 10 for i in range(11))
BLUR = 0.08
EXACT, GRAD_CAM, CENTRE, RANDOM = "exact map", "Grad-CAM", "centre first", "random places"
SHOWN = {CENTRE: "center first", RANDOM: "random order"}  # their names in tables


def run(bundle: Path, data: Path, count: int) -> dict[str, Any]:
    """Measure every map of every image; images are spread over the test split."""
    model = load_model(bundle).eval()
    rows: list[dict[str, list[float]]] = []
    for image in _images(model, data, count):
        with torch.inference_mode():
            label = int(model(image[None]).argmax())
        by_name = areas(model, image, label, _orders(model, image, label, len(rows)))
        rows.append({name: [area.deletion, area.insertion] for name, area in by_name.items()})
        print(f"{len(rows)} of {count} images", file=sys.stderr, flush=True)
    packages = ("functional", "nn", "models", "data", "explain", "lab/experiments")
    card = read_card(bundle)
    about = {
        "model": card.config.backbone,
        "pool": card.config.pool,
        "dim": card.config.dim,
        "images": len(rows),
    }
    return new_record("location_maps", packages, about, seed=SEED) | {"rows": rows}


@dataclass(frozen=True)
class Areas:
    """Areas under the probability of a class against the fraction of the image, from 0 to 1."""

    deletion: float
    insertion: float


def areas(
    classify: Callable[[Tensor], Tensor], image: Tensor, label: int, orders: Mapping[str, Tensor]
) -> dict[str, Areas]:
    """Measure several maps of one image.

    Args:
        classify: function from preprocessed images ``(B, 3, H, W)`` to logits.
        image: ``(3, H, W)``, preprocessed.
        label: index of the class.
        orders: maps ``(H, W)`` of the image's size; pixels with higher values come first.
    """
    blurred = _blurred(image)
    result = {}
    for name, order in orders.items():
        rank = order.flatten().argsort(descending=True).argsort().reshape(image.shape[1:])
        masks = torch.stack([rank < share * rank.numel() for share in SHARES])[:, None]
        both = torch.cat([torch.where(masks, blurred, image), torch.where(masks, image, blurred)])
        with torch.inference_mode():
            likely = classify(both).float().softmax(1)[:, label]
        deletion, insertion = (torch.trapezoid(part, dx=SHARES[1]) for part in likely.chunk(2))
        result[name] = Areas(float(deletion), float(insertion))
    return result


def centre_first(height: int, width: int) -> Tensor:
    """Return an order from the center outward; photographers center their subject."""
    y = torch.linspace(-1, 1, height)[:, None]
    x = torch.linspace(-1, 1, width)
    return -(y * y + x * x)


def _blurred(image: Tensor) -> Tensor:
    size = 2 * round(BLUR * image.shape[-1] * 2) + 1
    result: Tensor = gaussian_blur(image, [size, size], [BLUR * image.shape[-1]] * 2)
    return result


def _images(model: PooledClassifier, data: Path, count: int) -> Iterator[Tensor]:
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    for image in some_images(str(data), count):
        yield transform(decode(image.content))


def _orders(model: PooledClassifier, image: Tensor, label: int, number: int) -> dict[str, Tensor]:
    """Return maps of the image's size; the random map has the resolution of the exact one."""
    height, width = image.shape[1:]
    (exact,) = evidence_maps(model, image, [label])
    chance = torch.rand(exact.positions.shape, generator=torch.Generator().manual_seed(number))
    return {
        EXACT: _laid_over(exact.positions, width, height),
        GRAD_CAM: torch.from_numpy(_grad_cam(model, image, label)),
        CENTRE: centre_first(height, width),
        RANDOM: _laid_over(chance, width, height),
    }


def _laid_over(places: Tensor, width: int, height: int) -> Tensor:
    return torch.from_numpy(resized(places.numpy(), (width, height)).copy())


def _grad_cam(model: PooledClassifier, image: Tensor, label: int) -> Any:
    """Return the Grad-CAM map of the pooled features, those of the last block of the backbone."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    blocks = getattr(model.backbone, "blocks", None) or model.backbone.layer4
    with GradCAM(model=model, target_layers=[blocks[-1]]) as cam:
        maps = cam(input_tensor=image[None], targets=[ClassifierOutputTarget(label)])
    return maps[0]


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    about = results["arguments"]
    lines = [
        f"Evidence maps of {about['images']} test images, by a {about['model']} with {about['pool']}, "
        f"d = {about['dim']}. Each method orders the positions by importance. In this order, deletion blurs "
        "them, and insertion reveals them in a blurred image. Values are areas under the curve of the class "
        "probability against the blurred or revealed share of the image, mean ± standard error.",
        "",
        "| method | deletion (lower is better) | insertion (higher is better) | images where the exact map "
        "wins, deletion | images where the exact map wins, insertion |",
        "|---|---|---|---|---|",
    ]
    for name in results["rows"][0]:
        cells = [_mean([row[name][part] for row in results["rows"]]) for part in (0, 1)]
        wins = ["", ""] if name == EXACT else [_wins(results["rows"], name, part) for part in (0, 1)]
        lines.append(f"| {' | '.join([SHOWN.get(name, name), *cells, *wins])} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def _wins(rows: list[dict[str, list[float]]], name: str, part: int) -> str:
    sign = -1 if part == 0 else 1
    won = [sign * (row[EXACT][part] - row[name][part]) > 0 for row in rows]
    return f"{100 * statistics.mean(won):.0f} %"


def main(bundle: Path, data: Path, images: int = IMAGES, file: Path | None = None) -> None:
    """Compare the exact maps with Grad-CAM, by deletion and insertion.

    Args:
        bundle: folder of a trained model.
        data: a data set with a test split.
        images: number of test images.
        file: results file; by default that of this machine in results/.
    """
    results = run(bundle, data, images)
    write_record(file or record_file(results), results, table(results))
    print(table(results))
