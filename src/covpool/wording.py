"""Format counts, sizes, durations and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, what: str) -> str:
    """Return a count with its noun, in the singular for 1.

    Example:
        >>> counted(1, "image"), counted(1200, "image"), counted(2, "class")
        ('1 image', '1,200 images', '2 classes')
    """
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Return hours and minutes, or minutes and seconds.

    Example:
        >>> duration(40), duration(150), duration(7320)
        ('40 s', '2 min 30 s', '2 h 2 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def human(number: float, unit: str = "") -> str:
    """Return a number with three digits and a prefix.

    Example:
        >>> human(56_929_832), human(16.54e9, "B"), human(999_999, "B"), human(7, "B")
        ('56.9 M', '16.5 GB', '1.00 MB', '7 B')
    """
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number, power = number / 1000, power + 1
    decimals = 0 if not power or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f} {prefixes[power]}{unit}".rstrip()


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns two spaces apart, the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
