"""Draw figures: colors, fonts, and the bytes of a picture."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colors of figures; those of ``series`` are distinct with any color vision.

    Attributes:
        paper: background.
        ink: text.
        faint: secondary text and axes.
        grid: grid lines.
        series: lines of a plot, in order.
        right: color map of correct predictions.
        wrong: color map of errors.
    """

    paper: str
    ink: str
    faint: str
    grid: str
    series: tuple[str, str]
    right: tuple[str, str]
    wrong: tuple[str, str]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1f2328",
    faint="#656d76",
    grid="#e9edf1",
    series=("#0b6bb8", "#d1570a"),
    right=("#eaf3fb", "#0b6bb8"),
    wrong=("#fdeee2", "#c2410c"),
)
DARK = Theme(
    paper="#171b21",
    ink="#e6e9ed",
    faint="#9aa4af",
    grid="#262c34",
    series=("#5cb2f2", "#f59e5b"),
    right=("#1b2a38", "#4aa3e6"),
    wrong=("#35261d", "#ef8a45"),
)


def new_figure(theme: Theme, width: float, height: float) -> Figure:
    """Return an empty figure; sizes are in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.paper)


def dress(axes: Axes, theme: Theme) -> None:
    """Apply the theme to axes, and remove lines that do not help."""
    axes.set_facecolor(theme.paper)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(colors=theme.faint, labelcolor=theme.ink, labelsize=9)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def png(figure: Figure, dpi: int = 150) -> bytes:
    """Return the figure as the bytes of a PNG file, equal for equal figures."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()


# The first comes with matplotlib; the others cover more scripts, and are used if they are installed.
FAMILIES = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Noto Sans JP",
    "Noto Sans KR",
    "Noto Sans Devanagari",
    "Noto Sans Bengali",
    "Noto Sans Tamil",
    "Noto Sans Thai",
    "WenQuanYi Zen Hei",
    "Arial Unicode MS",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Nirmala UI",
    "Leelawadee UI",
)


def text_style() -> dict[str, Any]:
    """Return the options of a text that contains a name, whose dollar signs are not formulas."""
    return {"family": list(_families()), "parse_math": False, "usetex": False}


def drawn(name: str, instead: str, length: int) -> str:
    r"""Return a name as a figure can show it.

    Args:
        name: any text.
        instead: text to show if the installed fonts lack most of the name's characters.
        length: largest number of characters; longer names are cut in the middle, because class names often
            start alike.

    Example:
        >>> drawn("Clay colored\nSparrow", "class 4", 12)
        'Clay c…arrow'
    """
    one_line = " ".join(name.split())
    shown = "".join(character if ord(character) in _characters() else "□" for character in one_line)
    if not shown or shown.count("□") * 2 > len(shown):
        return instead
    if len(shown) <= length:
        return shown
    end = (length - 1) // 2
    return f"{shown[: length - 1 - end]}…{shown[len(shown) - end :]}"


@cache
def _families() -> tuple[str, ...]:
    installed = set(font_manager.fontManager.get_font_names())
    return tuple(family for family in FAMILIES if family in installed)


@cache
def _characters() -> frozenset[int]:
    fonts = (font_manager.get_font(font_manager.findfont(family)) for family in _families())
    return frozenset(code for font in fonts for code in font.get_charmap() if chr(code).isprintable())
