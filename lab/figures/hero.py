"""Draw images/hero.png, the first table of benchmarks.md: ``python -m lab figures hero``."""

from __future__ import annotations

import re
from pathlib import Path

from covpool.drawing import LIGHT, dress, new_figure, png
from lab.record import ROOT

DOCS = ROOT / "docs"
PICTURE = DOCS / "images" / "hero.png"
ROW = re.compile(
    r"^\| ([\w -]+) \| (\d+) \| \d+ \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \| [\d.]+", flags=re.MULTILINE
)


def draw() -> bytes:
    """Return the picture: a pair of bars for each data set and image size."""
    rows = ROW.findall((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    figure = new_figure(LIGHT, 8, 3.4)
    axes = figure.subplots()
    dress(axes, LIGHT)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    for row, (_, _, *accuracies) in enumerate(rows):
        for offset, accuracy, color in zip(
            (-0.19, 0.19), map(float, accuracies), ("#b6bec7", "#0b6bb8"), strict=True
        ):
            axes.barh(row + offset, accuracy, height=0.36, color=color)
            axes.text(
                accuracy + 0.6, row + offset, f"{accuracy:.1f}", va="center", fontsize=9, color=LIGHT.ink
            )
    names = [f"{name.removesuffix(' of CUB-200-2011')}, {pixels} px" for name, pixels, *_ in rows]
    axes.set(yticks=range(len(rows)), yticklabels=names, xticks=[], xlim=(0, 106))
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for bars, name in zip(axes.containers, ("average pooling", "covariance pooling"), strict=False):
        bars.set_label(name)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    title = "Top-1 accuracy in %, frozen EfficientNet-Lite0, linear classifier"
    axes.set_title(title, loc="left", fontsize=11, color=LIGHT.ink)
    return png(figure, dpi=200)


def write_pages() -> list[Path]:
    """Draw docs/images/hero.png."""
    PICTURE.write_bytes(draw())
    return [PICTURE]
