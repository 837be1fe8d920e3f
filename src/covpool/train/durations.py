"""Times for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds.

    Example:
        >>> duration(40), duration(150), duration(7320)
        ('40 s', '2 min 30 s', '2 h 2 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
