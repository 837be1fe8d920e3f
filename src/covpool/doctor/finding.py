"""What one test of a machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What one test found.

    Attributes:
        name: what was tested.
        state: ``skip`` where a package that it needs is not there, or the machine lacks what nothing needs.
        told: a figure, or what went wrong.
        remedy: what to do about it, where something went wrong or is missing.
    """

    name: str
    state: Literal["pass", "fail", "skip"]
    told: str
    remedy: str = ""


class NotHereError(Exception):
    """What a test needs is not on this machine, and covpool does without it.

    Args:
        told: what is not here.
        remedy: how to get it.
    """

    def __init__(self, told: str, remedy: str) -> None:
        super().__init__(told)
        self.remedy = remedy
