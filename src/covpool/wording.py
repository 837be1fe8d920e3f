"""Put counts and durations into words."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """Format a number of things, in the singular for 1.

    Example:
        >>> counted(1, "image"), counted(1200, "image"), counted(2, "class")
        ('1 image', '1,200 images', '2 classes')
    """
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Format a duration in hours and minutes, or in minutes and seconds.

    Example:
        >>> duration(40), duration(150), duration(7320)
        ('40 s', '2 min 30 s', '2 h 2 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
