"""Values and figures into one HTML file that needs nothing else, and runs nothing."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from covpool.drawing.theme import DARK, LIGHT, Theme, png
from covpool.train.durations import duration as time_for_people

DOTS_PER_INCH = 150
MISSING = "–"


@dataclass(frozen=True)
class Picture:
    """A figure for a page.

    Attributes:
        light: its address on a light page, which is the figure itself.
        dark: that on a dark page.
        width: in pixels of the page.
        height: in pixels of the page.
        alt: what it shows, in words.
    """

    light: str
    dark: str
    width: int
    height: int
    alt: str


def picture(draw: Callable[[Theme], Figure], alt: str) -> Picture:
    """Draw a figure for both kinds of page."""
    figure = draw(LIGHT)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Picture(_png_uri(figure), _png_uri(draw(DARK)), width, height, alt)


def render(template: str, **values: Any) -> bytes:
    """A page, with every value escaped; of a name that is no text, what is not becomes a question mark."""
    return _environment().get_template(template).render(**values).encode("utf-8", errors="replace")


def percent(share: float | None) -> str:
    r"""A share for people.

    Example:
        >>> percent(0.8731), percent(None)
        ('87.3\xa0%', '–')
    """
    return MISSING if not _is_known(share) else f"{100 * share:.1f}\u00a0%"


def points(difference: float | None) -> str:
    """A difference of two shares, in points of per cent and with its sign.

    Example:
        >>> points(0.0234), points(-0.0004), points(-0.05)
        ('+2.3', '0.0', '−5.0')
    """
    if not _is_known(difference):
        return MISSING
    text = f"{100 * difference:+.1f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def number(value: float | None, decimals: int = 0) -> str:
    """A number with its thousands set apart."""
    return MISSING if not _is_known(value) else f"{value:,.{decimals}f}"


def duration(seconds: float | None) -> str:
    """A time of hours and minutes, or of minutes and seconds."""
    return MISSING if not _is_known(seconds) else time_for_people(seconds)


def breakable(name: str) -> Markup:
    """A name, escaped, that may go on in the next line after what commonly joins words in names.

    Example:
        >>> breakable("114.House_<b>")
        Markup('114.House_<wbr>&lt;b&gt;')
    """
    return Markup("<wbr>").join(re.split(r"(?<=[_/-])", name))


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _png_uri(figure: Figure) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(figure, DOTS_PER_INCH)).decode()}"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("covpool.train.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "points": points,
        "number": number,
        "duration": duration,
        "breakable": breakable,
    }
    return environment
