"""Render pages: numbers, pictures, facts of a run."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from covpool.drawing import DARK, LIGHT, Theme, png
from covpool.wording import duration as time_for_people

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


SPLITS = {"train": "training", "val": "validation", "test": "test"}
# Keys of the metrics, and their names.
METRICS = {
    "top1": "Top-1",
    "top5": "Top-5",
    "macro_f1": "Macro F1",
    "balanced_accuracy": "Balanced accuracy",
    "loss": "Loss",
}
Fact = tuple[str, str]


def run_title(summary: Mapping[str, Any]) -> str:
    """The network and its pooling."""
    return f"{summary.get('model', 'model')} · {summary.get('pool', 'pooling')}"


def metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of the reported split by their keys; five guesses of five classes say nothing."""
    known: Mapping[str, Any] = summary.get("metrics") or {}
    return {
        key: known.get(key)
        for key in METRICS
        if key in known and (key, len(summary["classes"]) > 5) != ("top5", False)
    }


def metric_text(key: str, value: float | None) -> str:
    """A metric for people."""
    return number(value, 3) if key == "loss" else percent(value)


def facts(summary: Mapping[str, Any]) -> list[Fact]:
    """What was trained, on what, and for how long."""
    images: Mapping[str, int] = summary.get("images") or {}
    size = summary.get("image_size")
    found = [
        ("Network", str(summary.get("model", ""))),
        ("Pooling", _pooling(summary)),
        ("Parameters", number(summary.get("parameters"))),
        ("Image size", f"{size} px" if size else ""),
        ("Classes", number(len(summary["classes"]))),
        ("Images", ", ".join(f"{SPLITS.get(split, split)} {number(n)}" for split, n in images.items())),
        ("Epochs", _epochs(summary)),
        ("Steps", number(summary.get("steps"))),
        ("Time in training", duration(summary.get("seconds"))),
    ]
    if summary.get("bad_images"):
        found.append(("Unusable images", f"{number(summary['bad_images'])} (bad_images.csv)"))
    if summary.get("skipped_steps"):
        found.append(("Skipped steps", f"{number(summary['skipped_steps'])} (log.jsonl)"))
    return [fact for fact in found if fact[1]]


def environment(summary: Mapping[str, Any]) -> list[Fact]:
    """What is needed to get the same again."""
    versions: Mapping[str, Any] = summary.get("versions") or {}
    found = [
        ("Machine", str(summary.get("machine") or "")),
        ("Processes", number(summary.get("processes"))),
        ("Seed", str(summary.get("seed", ""))),
        ("Commit", _commit(summary)),
        *((name, str(version)) for name, version in versions.items()),
    ]
    return [fact for fact in found if fact[1]]


def _pooling(summary: Mapping[str, Any]) -> str:
    pool, dim = summary.get("pool"), summary.get("dim")
    return f"{pool}, {dim} channels" if pool and dim else str(pool or "")


def _epochs(summary: Mapping[str, Any]) -> str:
    epochs = number(summary.get("epochs"))
    if summary.get("validation") is None or summary.get("best_epoch") is None:
        return epochs
    return f"{epochs}, the best is {summary['best_epoch']}"


def _commit(summary: Mapping[str, Any]) -> str:
    source: Mapping[str, Any] = summary.get("source") or {}
    changed = ", with changes" if source.get("dirty") else ""
    return f"{source['commit'][:12]}{changed}" if source.get("commit") else ""
