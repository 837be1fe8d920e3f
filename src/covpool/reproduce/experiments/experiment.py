"""What an experiment by training is: rows that are trained, and claims of the paper about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from covpool.reproduce.claims import Claim
from covpool.reproduce.miniature.configuration import Configuration

Results = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        label: in the table.
        configuration: with the first seed.
        seeds: how many there are at most; ``None`` where a claim rests on it: as many as are asked for.
    """

    label: str
    configuration: Configuration
    seeds: int | None = None


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper.

    Attributes:
        name: on the command line and of its files.
        title: for people.
        paper: what the paper shows there, in a sentence.
        at_full_size: what would change there.
        rows: what is trained.
        claims: what the paper says about them, with a number or a sign.
        draw: the figure, from the results.
        reference: the row whose time the others' are divided by; ``None`` where nothing is timed.
        observed: rows that are looked into epoch by epoch.
    """

    name: str
    title: str
    paper: str
    at_full_size: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    draw: Callable[[Results, Figure], None]
    reference: str | None = None
    observed: tuple[str, ...] = ()

    def configurations(self, seeds: int) -> list[tuple[str, Configuration]]:
        """Labels and what to train, for so many seeds at most; all of a seed before the next."""
        return [
            (row.label, replace(row.configuration, seed=seed))
            for seed in range(seeds)
            for row in self.rows
            if row.seeds is None or seed < row.seeds
        ]
