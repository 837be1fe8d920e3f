"""What a person sees while a run trains: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from covpool.models.strict_json import printable

# Seconds between two looks of the bar, and between two lines in a log.
ON_A_TERMINAL, IN_A_LOG = 0.1, 30.0


class TrainingProgress:
    """The progress of a run, for ``with``, which clears the bar away at the end.

    Nothing here runs in a thread or takes over the streams: the workers of data loaders are forked from this
    process, and must not inherit a lock that somebody holds.

    Args:
        rank: of the process; only that of rank 0 is heard of.
        stream: to write to; that of errors if not given, so that results can be piped.
    """

    def __init__(self, rank: int = 0, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.is_silent = rank != 0
        # Not what rich thinks, which takes a log for a terminal if it is told to use colours.
        self.is_terminal = self.stream.isatty() and not Console(file=self.stream).is_dumb_terminal
        self._bar = _bar(self.stream) if self.is_terminal and not self.is_silent else None
        self._told = self._began = time.monotonic()
        self._epoch = self._epochs = self._steps = self._done = self._done_before = 0

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def start(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        """Begin an epoch, or go on with one.

        Args:
            epoch: its number, from 0.
            epochs: how many there are.
            steps: how many an epoch has.
            done: how many of this one were done before.
        """
        is_first = not self._epochs
        self._epoch, self._epochs, self._steps = epoch, epochs, steps
        self._done = epoch * steps + done
        if is_first:  # what was done in an earlier life says nothing of the speed of this one
            self._began, self._done_before = time.monotonic(), self._done
            if self._bar is not None:
                self._bar.add_task(
                    "", total=epochs * steps, completed=self._done, epoch=self._where(), figures=""
                )

    def step(self, loss: float, top1: float, images_per_second: float, lr: float) -> None:
        """Tell of a step that was done, if it is time.

        Args:
            loss: of the last, or a mean.
            top1: a share from 0 to 1.
            images_per_second: over all processes.
            lr: the learning rate.
        """
        self._done += 1
        now = time.monotonic()
        if self.is_silent or now - self._told < (ON_A_TERMINAL if self.is_terminal else IN_A_LOG):
            return
        self._told = now
        figures = [
            f"loss {loss:.3f}",
            f"top-1 {100 * top1:.1f} %",
            f"{images_per_second:,.0f} img/s",
            f"lr {lr:.2g}",
            f"{_duration(self._seconds_left(now))} left",
        ]
        if self._bar is None:
            self._write(", ".join([self._where(), *figures]))
        else:
            # The learning rate is the first to go where there is little room.
            self._bar.update(
                self._bar.task_ids[0],
                completed=self._done,
                epoch=self._where(),
                figures="  ".join(figures if self._bar.console.width >= 96 else [*figures[:3], figures[4]]),
            )
            self._bar.refresh()

    def line(self, text: str) -> None:
        """Write a line that stays, above the bar; what a terminal might obey in it is not let through."""
        if self.is_silent:
            return
        for part in text.splitlines():
            if self._bar is None:
                self._write(printable(part))
            else:
                self._bar.console.print(printable(part), markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _where(self) -> str:
        """The epoch, and in a log, which shows no bar, how much of all is done."""
        epoch = f"epoch {self._epoch + 1}/{self._epochs}"
        if self._bar is not None:
            return epoch
        return f"{epoch}, step {self._done - self._epoch * self._steps:,} of {self._steps:,}"

    def _seconds_left(self, now: float) -> float:
        """By all that was done so far, so that validation and checkpoints count as well."""
        left = self._epochs * self._steps - self._done
        return (now - self._began) * left / max(self._done - self._done_before, 1)

    def _write(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()


def _bar(stream: TextIO) -> Progress:
    return Progress(
        TextColumn("{task.fields[epoch]}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %", markup=False),
        TextColumn("{task.fields[figures]}", markup=False),
        console=Console(file=stream, force_terminal=True),
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
        expand=True,
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min" if minutes >= 10 else f"{minutes}:{seconds:02} min"
