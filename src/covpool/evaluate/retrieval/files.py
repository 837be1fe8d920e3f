"""What a search leaves besides its results: a table of the queries, and a picture of some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from covpool.drawing.theme import LIGHT, png
from covpool.durable.replacing import replace_file
from covpool.evaluate.retrieval.embeddings import Side
from covpool.evaluate.retrieval.neighbours import Found, chosen_queries, draw_neighbours
from covpool.evaluate.retrieval.scores import Scores
from covpool.train.csv_file import csv_bytes
from covpool.train.report.thumbnails import thumbnail
from covpool.train.run_folder import RunFolder

COLUMNS = ("name", "label", "matches", "first_match", "average_precision", "at_r", "nearest", "nearest_label")


def write_files(folder: Path, scores: Scores, queries: Side, gallery: Side | None) -> None:
    """Write ``queries.csv``, ``neighbours.png`` and ``bad_images.csv``; no gallery means the queries."""
    searched = gallery or queries
    replace_file(folder / "queries.csv", csv_bytes(COLUMNS, _rows(scores, queries, searched)))
    rows = [
        (
            _found(queries, query),
            float(scores.best_known_precision[query]),
            [_found(searched, place) for place in scores.nearest[query].tolist()],
        )
        for query in chosen_queries(scores)
    ]
    replace_file(folder / "neighbours.png", png(draw_neighbours(rows, LIGHT), dpi=110))
    bad = [image for side in (queries, gallery) if side for image in side.embeddings.bad]
    RunFolder(folder).write_bad_images(bad)


def _found(side: Side, place: int) -> Found:
    return Found(side.label(place), thumbnail(side.images, int(side.embeddings.ids[place])))


def _rows(scores: Scores, queries: Side, gallery: Side) -> Iterator[list[object]]:
    whole = scores.precision
    for query, matches in enumerate(scores.matches.tolist()):
        nearest = int(scores.nearest[query, 0])
        yield [
            queries.name(query),
            queries.label(query),
            matches,
            int(scores.first_match[query]) or "",
            f"{whole[query]:.6g}" if matches and whole is not None else "",
            f"{scores.precision_at_r[query]:.6g}" if matches else "",
            gallery.name(nearest),
            gallery.label(nearest),
        ]
