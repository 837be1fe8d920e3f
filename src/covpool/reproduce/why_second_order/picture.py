"""Birds, the places of their images in two channels, and what three numbers make of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from covpool.drawing import LIGHT, dress, new_figure, png

THUMBNAIL, GAP = (220, 165), 6  # pixels
ROWS = 2  # of two images, for each species
DEVIATIONS = (1, 2)


def draw(results: dict[str, Any], data: Path) -> bytes:
    """The picture, as PNG; the photographs are read again."""
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
    for axes, one, colour in zip(panels, species, LIGHT.series, strict=True):
        shown = [_thumbnail(data / image["name"]) for image in typical(one["images"])[: 2 * ROWS]]
        rows = [np.concatenate(shown[2 * i : 2 * i + 2], axis=1) for i in range(ROWS)]
        axes.imshow(np.concatenate(rows))
        axes.set_title(one["name"], color=colour, fontsize=12, weight="bold", loc="left")
        axes.set_axis_off()


def typical(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those first whose covariance is nearest to the middle one."""
    middle = float(np.median([image["numbers"][2] for image in images]))
    return sorted(images, key=lambda image: abs(image["numbers"][2] - middle))


def _thumbnail(file: Path) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(file.read_bytes())) as picture:
        fitted = ImageOps.pad(picture.convert("RGB"), THUMBNAIL, color="white")
    return np.pad(np.asarray(fitted), ((0, GAP), (0, GAP), (0, 0)), constant_values=255)


def _draw_places(part: Any, results: dict[str, Any]) -> None:
    """Both species in one panel: clouds, ellipses of one and two standard deviations, and means."""
    axes = part.subplots()
    dress(axes, LIGHT)
    for one, colour in zip(results["species"], LIGHT.series, strict=True):
        cloud = np.concatenate([np.asarray(image["places"]) for image in one["images"]], axis=1)
        axes.scatter(*cloud, s=4, color=colour, alpha=0.22, lw=0)
        centre, within = cloud.mean(1), covariance_within(one["images"])
        for deviations in DEVIATIONS:
            axes.plot(*ellipse(centre, within, deviations), color=colour, lw=2.2 if deviations == 2 else 1.2)
        axes.plot(*centre, marker="+", ms=15, mew=3, color=colour, zorder=4)
    a, b = results["channels"]
    axes.set_xlabel(f"channel {a}", color=LIGHT.ink)
    axes.set_ylabel(f"channel {b}", color=LIGHT.ink)
    axes.set_title(
        "All places of all images: one centre, two shapes", loc="left", fontsize=11, color=LIGHT.ink
    )
    axes.set_aspect("equal")
    axes.set_xlim(*_range(results["species"], 0))
    axes.set_ylim(*_range(results["species"], 1))


def covariance_within(images: list[dict[str, Any]]) -> NDArray[np.float64]:
    """The mean over images of the covariance over places, which is what the pooling sees."""
    matrices = [np.cov(np.asarray(image["places"]), bias=True) for image in images]
    within: NDArray[np.float64] = np.mean(matrices, axis=0)
    return within


def ellipse(centre: Any, matrix: NDArray[np.float64], deviations: float) -> NDArray[np.float64]:
    """Points ``(2, m)`` at so many standard deviations."""
    angle = np.linspace(0, 2 * np.pi, 181)
    values, vectors = np.linalg.eigh(matrix)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    moved: NDArray[np.float64] = (
        np.asarray(centre)[:, None] + deviations * (vectors * np.sqrt(values)) @ circle
    )
    return moved


def _range(species: list[dict[str, Any]], row: int) -> tuple[float, float]:
    """Of nearly all places."""
    values = np.concatenate([image["places"][row] for one in species for image in one["images"]])
    low, high = np.quantile(values, [0.01, 0.99])
    return float(low - 0.05 * (high - low)), float(high + 0.05 * (high - low))


def _draw_numbers(part: Any, results: dict[str, Any]) -> None:
    """A strip for each number: an image is a dot, and a line is the middle of a species."""
    panels = part.subplots(3, 1)
    for i, (axes, row) in enumerate(zip(panels, results["numbers"], strict=True)):
        dress(axes, LIGHT)
        axes.grid(visible=False, axis="y")
        for place, (one, colour) in enumerate(zip(results["species"], LIGHT.series, strict=True)):
            values = [image["numbers"][i] for image in one["images"]]
            axes.scatter(values, np.full(len(values), -place), s=26, color=colour, alpha=0.5, lw=0)
            axes.vlines(float(np.median(values)), -place - 0.3, -place + 0.3, color=colour, lw=2.5)
        axes.set_ylim(-1.55, 0.55)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_title(row["what"], loc="left", fontsize=11, color=LIGHT.ink)
        words = f"tells {100 * row['right']:.0f} % of pairs apart"
        axes.set_title(words, loc="right", fontsize=10, color=LIGHT.faint)
