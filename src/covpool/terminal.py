"""What commands print: counts, sizes, durations and tables in words, and the progress of long jobs."""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO


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


def printable(text: str, most: int | None = 300) -> str:
    """Return at most ``most`` characters, with question marks for those that control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:most])


if TYPE_CHECKING:
    from rich.progress import Progress as Bar

# Seconds between two updates.
ON_A_TERMINAL, IN_A_LOG = 0.1, 30.0
# Seconds without a line in a log, after which a job that begins prints one.
SILENCE = 2.0
# Seconds over which the speed is measured, so that the remaining time follows when it changes.
WINDOW = 120.0


class _Command:
    """The command that runs: whether it is quiet, and when its last line of progress was printed."""

    quiet = False
    printed = math.inf


@contextlib.contextmanager
def running(*, quiet: bool) -> Iterator[None]:
    """Begin a command; a quiet one prints no progress."""
    before = _Command.quiet, _Command.printed
    _Command.quiet, _Command.printed = quiet, time.monotonic()
    try:
        yield
    finally:
        _Command.quiet, _Command.printed = before


def announce_loading(command: str) -> None:
    """Print a line before torch is imported, which takes seconds."""
    if "torch" not in sys.modules and not _Command.quiet:
        print(f"{command}: loading torch", file=sys.stderr, flush=True)
        _note_line()


def _note_line() -> None:
    if _Command.printed < math.inf:  # in a command
        _Command.printed = time.monotonic()


class Progress:
    """Show how much of a job is done. Use it in ``with``, which removes the bar at the end.

    Without rich it prints lines. It starts no thread and leaves the streams alone: data loader workers are
    forked from this process and must not inherit a lock that another thread holds.

    Args:
        what: the counted items, in the plural.
        stream: where to write; stderr if not given, so that results can be piped.
        silent: print nothing, as in every process but the first.
    """

    def __init__(self, what: str = "", stream: TextIO | None = None, *, silent: bool = False) -> None:
        silent = silent or _Command.quiet
        self.what, self.silent, self.left = what, silent, "left"
        self.stream = sys.stderr if stream is None else stream
        self._bar = None if silent else _bar(self.stream)
        self.begin()

    def __enter__(self) -> Progress:
        return self

    def begin(self, done: int = 0) -> None:
        """Measure the speed from now on, when ``done`` items are done already."""
        self._shown = time.monotonic()
        self._before, self._is_new = done, True
        self._samples = deque([(self._shown, done)])

    def __call__(self, done: int, total: int, where: str = "", figures: str = "") -> None:
        """Show the state of the job, unless it was shown a moment ago.

        Args:
            done: the number of items that are done.
            total: the number of all items.
            where: words for the place in the job, instead of "3 of 10 items".
            figures: words to add, such as the loss. A narrow terminal cuts them off.
        """
        now = time.monotonic()
        if self._bar is None:
            waits = now - self._shown < IN_A_LOG and not (self._is_new and now - _Command.printed >= SILENCE)
        else:  # show the start: the first item may take long
            waits = now - self._shown < ON_A_TERMINAL and done != self._before
        if self.silent or waits:
            return
        self._shown = now
        _note_line()
        self._is_new = False
        words = [where or f"{done:,} of {total:,} {self.what}"]
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW:
            self._samples.popleft()
        began, before = self._samples[0]
        if done > before and now - began >= 1:  # not by what was done before this job began
            words.append(f"{duration((now - began) * (total - done) / (done - before))} {self.left}")
        text = ", ".join([*words, figures] if figures else words)
        if self._bar is None:
            print(text, file=self.stream, flush=True)
            return
        self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=text, completed=done, total=total)
        self._bar.refresh()

    def line(self, text: str) -> None:
        """Print lines that stay, above the bar. Control characters become question marks."""
        for part in () if self.silent else text.splitlines():
            _note_line()
            if self._bar is None:
                print(printable(part), file=self.stream, flush=True)
            else:
                self._bar.console.print(printable(part), markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


# Gives a function of the numbers done and to do, for the name of the counted items. ``Progress`` is one.
Progresses = Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]


@contextlib.contextmanager
def silent(what: str) -> Iterator[Callable[[int, int], None]]:
    """No progress bar."""
    yield lambda done, total: None


class NamedProgress:
    """Show several jobs, one after the other: each new name starts a new count."""

    def __init__(self) -> None:
        self._progress, self._done = Progress(), 0

    def __enter__(self) -> NamedProgress:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the state of the job ``what``."""
        if what != self._progress.what or done < self._done:
            self._progress.what = what
            self._progress.begin(done)
        self._done = done
        self._progress(done, total)

    def log(self, sentence: str) -> None:
        """Print a line above the bar."""
        self._progress.line(sentence)

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__()


def _bar(stream: TextIO) -> Bar | None:
    """Make a bar of rich; ``None`` without rich or a terminal."""
    if not stream.isatty():  # rich would take a file for a terminal where FORCE_COLOR is set
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        return None
    console = Console(file=stream, force_terminal=True)
    if console.is_dumb_terminal:
        return None
    bar = Bar(
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %", markup=False),
        TextColumn("{task.description}", markup=False),
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )
    bar.add_task("")
    return bar


# Names in other programs.
OTHER_NAMES = {
    "arch": ("model",),
    "backbone": ("model",),
    "classify": ("predict",),
    "finetune": ("fit",),
    "gpu": ("device", "cuda"),
    "pool": ("heads",),
    "pooling": ("heads",),
    "test": ("eval",),
}


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the choice most similar to ``word`` as the end of a sentence, or nothing.

    It is for the words of a command line. :mod:`covpool.arguments` has one for values in Python.
    """
    bare = {choice.lstrip("-").casefold(): choice for choice in choices}  # hyphens make any two options alike
    word = word.lstrip("-").casefold()
    near = sorted((name for name in bare if name.startswith(word)), key=len)
    near += [name for name in bare if len(name) > 2 and word.startswith(name)]
    near += [name for name in bare if name in OTHER_NAMES.get(word, ())]
    near += difflib.get_close_matches(word, bare, cutoff=0.7)
    return f": did you mean {bare[near[0]]}?" if near else ""
