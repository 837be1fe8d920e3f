"""What an engine is given, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from covpool.evaluate.bulk.decode import Batch, Decoder
from covpool.evaluate.bulk.place import Place
from covpool.evaluate.bulk.tables import Format, write_table
from covpool.evaluate.bulk.tasks import Columns
from covpool.evaluate.bulk.units import Unit, UnlabelledImages
from covpool.functional.arguments import check_choice, check_whole

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Running:
    """How a job is run, which the rows do not depend on, but for the last bits of a number.

    Attributes:
        batch_size: images that the network sees at once.
        workers: processes that read and decode; 0 for none but this one. The cluster's matter with Ray.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
        engine: ``"local"`` for this machine, ``"ray"`` for a cluster.
        actors: with Ray, processes with a network each.
        ray_address: of a cluster of Ray; one is started on this machine if not given.
    """

    batch_size: int = 64
    workers: int = 2
    device: str = "auto"
    engine: Literal["local", "ray"] = "local"
    actors: int = 1
    ray_address: str | None = None

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ("local", "ray"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for name, least in (("batch_size", 1), ("workers", 0), ("actors", 1)):
            check_whole(name, getattr(self, name), at_least=least)


@dataclass(frozen=True)
class Writer:
    """Writes the rows of a unit.

    Attributes:
        place: where to.
        format: of the file.
    """

    place: Place
    format: Format

    def file(self, unit: Unit) -> str:
        """The name of a unit's file."""
        return f"{unit.name}.{self.format}"

    def __call__(self, unit: Unit, parts: Sequence[Columns]) -> None:
        """Write all rows of a unit at once."""
        self.place.write(self.file(unit), write_table(parts, self.format))


@dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
        images: all of the input.
        units: those that are not done yet.
        decoder: from bytes to pixels.
        make_predictor: makes the function from pixels to rows, once in each process that has a network.
        writer: of the rows.
    """

    images: UnlabelledImages
    units: Sequence[Unit]
    decoder: Decoder
    make_predictor: Callable[[], Callable[[Batch], Columns]]
    writer: Writer


def bad_rows(rows: Columns) -> int:
    """How many have an error."""
    return int((rows["error"] != "").sum())
