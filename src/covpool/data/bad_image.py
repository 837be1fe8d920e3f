"""What is wrong with an image that cannot be used."""

from __future__ import annotations

from typing import Literal

Reason = Literal["unreadable", "truncated", "too large", "format"]


class BadImageError(ValueError):
    """Why this is no usable image, in one sentence.

    Attributes:
        reason: ``"unreadable"``: no image, or a broken one; ``"truncated"``: its end is missing;
            ``"too large"``: past the limit that keeps a small file from filling the memory; ``"format"``: a
            kind of image that covpool does not read.
        sentence: the same as ``str`` of the error.
    """

    def __init__(self, reason: Reason, sentence: str) -> None:
        # Both are arguments of the exception, so that it survives the way from a worker process.
        super().__init__(reason, sentence)
        self.reason: Reason = reason
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence
