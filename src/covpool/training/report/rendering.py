"""Render the pages of reports, and format their numbers."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from covpool.terminal import duration as time_for_people

MISSING = "–"


def render(template: str, **values: Any) -> bytes:
    """Render a page with every value escaped; bytes that are not text become question marks."""
    return _environment().get_template(template).render(**values).encode("utf-8", errors="replace")


def percent(share: float | None) -> str:
    r"""Format a share as a percentage.

    Example:
        >>> percent(0.8731), percent(None)
        ('87.3\xa0%', '–')
    """
    return MISSING if not _is_known(share) else f"{100 * share:.1f}\u00a0%"


def points(difference: float | None) -> str:
    """Format a difference of two shares in percentage points, with its sign.

    Example:
        >>> points(0.0234), points(-0.0004), points(-0.05)
        ('+2.3', '0.0', '−5.0')
    """
    if not _is_known(difference):
        return MISSING
    text = f"{100 * difference:+.1f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def number(value: float | None, decimals: int = 0) -> str:
    """Format a number with separators between thousands."""
    return MISSING if not _is_known(value) else f"{value:,.{decimals}f}"


def duration(seconds: float | None) -> str:
    """Format a time in hours and minutes, or in minutes and seconds."""
    return MISSING if not _is_known(seconds) else time_for_people(seconds)


def breakable(name: str) -> Markup:
    """Escape a name, and allow a line break after ``_``, ``/`` and ``-``.

    Example:
        >>> breakable("114.House_<b>")
        Markup('114.House_<wbr>&lt;b&gt;')
    """
    return Markup("<wbr>").join(re.split(r"(?<=[_/-])", name))


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("covpool.training.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {one.__name__: one for one in (percent, points, number, duration, breakable)}
    return environment
