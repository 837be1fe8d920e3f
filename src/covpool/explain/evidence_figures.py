"""Draw evidence maps over images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from covpool.data.transforms import Preprocessing
from covpool.drawing import LIGHT, drawn, new_figure, text_style
from covpool.explain.evidence import Evidence

# Colors for and against a class: distinct with any color vision, and on photographs.
FOR, AGAINST = (255, 122, 0), (0, 110, 255)
# Largest opacity of the map, and contrast of the gray photograph below it.
COVER, FADE = 0.75, 0.85
SIDE, LETTERS, COLUMNS = 2.3, 26, 4
# Pairs drawn per sign, and their smallest distance in positions: neighbors have similar features.
PAIRS, APART = 4, 2.0


@dataclass(frozen=True, eq=False)
class Explained:
    """An image with its evidence maps, the predicted class first.

    Attributes:
        name: name of the image.
        picture: the preprocessed image.
        evidence: maps of some classes.
        classes: names of all classes.
        predicted: index of the predicted class.
        label: name of the correct class, if it is known.
    """

    name: str
    picture: Image.Image
    evidence: tuple[Evidence, ...]
    classes: tuple[str, ...]
    predicted: int
    label: str | None = None

    @property
    def title(self) -> str:
        """The shortened name of the image."""
        return drawn(PurePosixPath(self.name).stem, "", LETTERS)

    def overlay(self, positions: Tensor, largest: float | None = None) -> Image.Image:
        """Draw a map over the picture."""
        return overlay(self.picture, positions, largest)


def draw_classes(explained: Explained) -> Figure:
    """Draw the image and a map for each class on one scale, with joined averages in a second row."""
    joined = explained.evidence[0].first_order is not None
    figure, panels = _panels(1 + len(explained.evidence), 2 if joined else 1)
    largest = _largest(
        [evidence.positions for evidence in explained.evidence]
        + [evidence.first_order for evidence in explained.evidence if evidence.first_order is not None]
    )
    right = "" if explained.label is None else f"is {_named(explained.label)}"
    _show(panels[0][0], explained.picture, explained.title, right)
    if joined:
        panels[1][0].set_axis_off()
    for column, evidence in enumerate(explained.evidence, 1):
        part = "covariance" if evidence.kind == "exact" else "by gradient"
        words = f"{part} {float(evidence.positions.sum()):+.2f}, rest {evidence.rest:+.2f}"
        title = f"{_named(explained.classes[evidence.label])}: {evidence.logit:.2f}"
        _show(panels[0][column], explained.overlay(evidence.positions, largest), title, words)
        if evidence.first_order is not None:
            words = f"average {float(evidence.first_order.sum()):+.2f}"
            _show(panels[1][column], explained.overlay(evidence.first_order, largest), "", words)
    _legend(figure, explained.evidence[0].kind)
    return figure


def draw_against(explained: Explained, this: Evidence, that: Evidence) -> Figure:
    """Draw why one class and not the other: the difference of their maps."""
    difference = contrast(this, that)
    figure, panels = _panels(2, 1)
    names = [_named(explained.classes[evidence.label]) for evidence in (this, that)]
    _show(panels[0][0], explained.picture, explained.title, "")
    title = f"{names[0]},\nnot {names[1]}"
    words = f"{this.logit:.2f} - {that.logit:.2f} = {this.logit - that.logit:+.2f}"
    _show(panels[0][1], explained.overlay(difference), title, words)
    _legend(figure, this.kind)
    return figure


def draw_pairs(explained: Explained, evidence: Evidence) -> Figure:
    """Draw the strongest pairs of positions as lines."""
    assert evidence.pairs is not None
    figure, panels = _panels(2, 1)
    _show(panels[0][0], explained.picture, explained.title, "")
    title = f"{_named(explained.classes[evidence.label])}: pairs of positions"
    _show(panels[0][1], explained.overlay(evidence.positions), title, "")
    rows, columns = evidence.positions.shape
    width, height = explained.picture.size
    strongest = strongest_pairs(evidence)
    largest = max((abs(value) for *_, value in strongest), default=1.0)
    for p, q, value in strongest:
        x = [(place % columns + 0.5) * width / columns for place in (p, q)]
        y = [(place // columns + 0.5) * height / rows for place in (p, q)]
        color = [part / 255 for part in (FOR if value > 0 else AGAINST)]
        panels[0][1].plot(x, y, "o-", color=color, linewidth=1 + 3 * abs(value) / largest, markersize=4)
    _legend(figure, evidence.kind)
    return figure


def draw_sheet(explained: Sequence[Explained]) -> Figure:
    """Draw many images, each next to the map of its first class."""
    rows = -(-len(explained) // (COLUMNS // 2))
    figure, panels = _panels(COLUMNS, rows)
    for axes in (axes for row in panels for axes in row):
        axes.set_axis_off()
    for number, image in enumerate(explained):
        row, pair = divmod(number, COLUMNS // 2)
        first = image.evidence[0]
        right = "" if image.label is None else f"is {_named(image.label)}"
        _show(panels[row][2 * pair], image.picture, image.title, right)
        name = image.classes[first.label]
        wrong = image.label is not None and image.label != name
        how = "evidence for" if first.label != image.predicted else "taken for" if wrong else "seen as"
        words = f"{how} {_named(name)}"
        _show(panels[row][2 * pair + 1], image.overlay(first.positions), words, f"{first.logit:.2f}")
    _legend(figure, explained[0].evidence[0].kind)
    return figure


def overlay(picture: Image.Image, positions: Tensor, largest: float | None = None) -> Image.Image:
    """Draw a map over the gray picture.

    Args:
        picture: the preprocessed image.
        positions: ``(h, w)``.
        largest: absolute value with the largest opacity (default: the map's own); the same value for several
            maps makes them comparable.
    """
    map_hw: NDArray[np.float32] = positions.detach().cpu().float().numpy()
    largest = float(np.abs(map_hw).max()) if largest is None else largest
    share = resized(map_hw / (largest or 1.0), picture.size).clip(-1, 1)
    gray = np.asarray(picture.convert("L").convert("RGB"), dtype=np.float32)
    base = 255 * (1 - FADE) + gray * FADE
    color = np.where(share[..., None] > 0, np.array(FOR), np.array(AGAINST))
    cover = COVER * np.abs(share)[..., None]
    return Image.fromarray((base * (1 - cover) + color * cover).round().clip(0, 255).astype(np.uint8))


def contrast(this: Evidence, that: Evidence) -> Tensor:
    """Return the difference of the maps of two classes, including joined averages."""
    difference = this.positions - that.positions
    if this.first_order is not None and that.first_order is not None:
        difference = difference + this.first_order - that.first_order
    return difference


def strongest_pairs(evidence: Evidence) -> list[tuple[int, int, float]]:
    """Return pairs of positions and their contributions: the most positive, then the most negative."""
    assert evidence.pairs is not None
    rows, columns = evidence.positions.shape
    n = rows * columns
    y, x = torch.arange(n) // columns, torch.arange(n) % columns
    distance = ((y[:, None] - y) ** 2 + (x[:, None] - x) ** 2).float().sqrt()
    both = (evidence.pairs + evidence.pairs.T).cpu() * (
        (distance >= APART) & (torch.arange(n)[:, None] < torch.arange(n))
    )
    order = both.flatten().argsort(descending=True).tolist()
    chosen = [*order[:PAIRS], *reversed(order[-PAIRS:])]
    return [
        (i // n, i % n, float(both.flatten()[i])) for i in dict.fromkeys(chosen) if both.flatten()[i] != 0
    ]


def resized(map_hw: NDArray[Any], size: tuple[int, int]) -> NDArray[np.float32]:
    """Resize a map to the size of a picture, bilinearly: bicubic would overshoot."""
    smooth = Image.fromarray(map_hw.astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    return np.asarray(smooth, dtype=np.float32)


def seen(image: Tensor, preprocessing: Preprocessing) -> Image.Image:
    """Convert a preprocessed image, ``(3, H, W)`` or gray ``(1, H, W)``, to a picture."""
    mean, std = np.array(preprocessing.mean), np.array(preprocessing.std)
    pixels = image.detach().cpu().numpy().transpose(1, 2, 0) * std + mean
    rgb = np.broadcast_to(pixels.clip(0, 1), (*pixels.shape[:2], 3))
    return Image.fromarray((rgb * 255).round().astype(np.uint8))


def _panels(columns: int, rows: int) -> tuple[Figure, list[list[Axes]]]:
    figure = new_figure(LIGHT, SIDE * columns, (SIDE + 0.55) * rows + 0.3)
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def _show(axes: Axes, picture: Image.Image, title: str, words: str) -> None:
    axes.imshow(picture)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=8, color=LIGHT.ink, **text_style())
    axes.set_xlabel(words, fontsize=7.5, color=LIGHT.faint, **text_style())
    axes.set_axis_on()


def _largest(maps: Sequence[Tensor]) -> float:
    return max(float(map_.abs().max()) for map_ in maps)


def _named(name: str) -> str:
    return drawn(name, "(name not displayable)", LETTERS)


def _legend(figure: Figure, kind: str) -> None:
    how = "exact: map and rest sum to the logit" if kind == "exact" else "by gradient: an approximation"
    text = f"orange supports the class, blue opposes it; {how}"
    figure.supxlabel(text, fontsize=7.5, color=LIGHT.faint)
