"""What an experiment is that other commands of covpool make: where its results are, and its claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.provenance.origin import results_file
from covpool.reproduce.claims import Claim

Results = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A table of the paper.

    Attributes:
        name: on the command line.
        title: for people.
        paper: what the paper shows there, in a sentence.
        at_full_size: what would change there.
        files: the beginnings of the names of its files of results.
        claims: judged by a dictionary of the results, each under the beginning of its file's name.
        run: makes them: from a folder of image sets, one for runs and that of results.
        needs_sets: whether there is nothing to do without image sets.
    """

    name: str
    title: str
    paper: str
    at_full_size: str
    files: tuple[str, ...]
    claims: tuple[Claim, ...]
    run: Callable[[Path | None, Path, Path], None]
    needs_sets: bool = False

    def read(self, folder: Path) -> tuple[Results, list[Path]]:
        """The results that are in a folder, and where they are."""
        found = {name: results_file(folder, name) for name in self.files}
        paths = {name: path for name, path in found.items() if path is not None}
        return {name: json.loads(path.read_bytes()) for name, path in paths.items()}, list(paths.values())
