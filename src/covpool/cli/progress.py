"""How far a long verb is: a bar on a terminal, and a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from covpool.wording import duration

BAR = 30
# Seconds between two words of it.
ON_A_TERMINAL, IN_A_LOG = 0.1, 30.0


class Progress:
    """Call it with what is done and what there is in all; use it in ``with``, which clears the bar away.

    Args:
        what: is counted, in the plural.
        stream: to write to; that of errors if not given, so that results can be piped.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self.what = what
        self.stream = sys.stderr if stream is None else stream
        self.is_terminal = self.stream.isatty()
        self.started = self.told = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        """Tell, if it is time."""
        now = time.monotonic()
        begins = self.is_terminal and not done  # at once: the first of few may take long
        if not begins and now - self.told < (ON_A_TERMINAL if self.is_terminal else IN_A_LOG):
            return
        self.told = now
        line = f"{done:,} of {total:,} {self.what}"
        if done:  # before, nobody knows
            line += f", {duration((now - self.started) * (total - done) / done)} left"
        if self.is_terminal:
            bar = "#" * (BAR * done // max(total, 1))
            self.stream.write(f"\r[{bar.ljust(BAR)}] {line}\x1b[K")
        else:
            self.stream.write(f"{line}\n")
        self.stream.flush()

    def __exit__(self, *exception: object) -> None:
        if self.is_terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


class NamedProgress:
    """Several counts, one after the other: called with what is counted too, it begins a bar for each.

    One that is counted again begins anew.
    """

    def __init__(self) -> None:
        self._what, self._done = "", 0
        self._bar: Progress | None = None

    def __enter__(self) -> NamedProgress:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        """Tell, if it is time."""
        if self._bar is None or what != self._what or done < self._done:
            self._bar = Progress(what)
        self._what, self._done = what, done
        self._bar(done, total)

    def tell(self, sentence: str) -> None:
        """A line among the bars; one that is there makes way for it."""
        self.__exit__()
        print(sentence, file=sys.stderr)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()
