"""What a search leaves besides its results: a table of the queries, and a picture of some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from covpool.data.batch import BadImage
from covpool.data.image_set import ImageSet
from covpool.evaluate.retrieval.embeddings import Embeddings
from covpool.evaluate.retrieval.neighbours import Found, chosen_queries, draw_neighbours
from covpool.evaluate.retrieval.scores import Scores
from covpool.models.bundles.durable import replace_file
from covpool.train.csv_file import csv_bytes
from covpool.train.report.theme import LIGHT, png
from covpool.train.report.thumbnails import thumbnail
from covpool.train.run_folder import RunFolder

COLUMNS = ("name", "label", "matches", "first_match", "average_precision", "at_r", "nearest", "nearest_label")
Side = tuple[ImageSet, Embeddings]


def write_files(folder: Path, scores: Scores, queries: Side, gallery: Side, bad: Sequence[BadImage]) -> None:
    """Write ``queries.csv``, ``neighbours.png`` and ``bad_images.csv``."""
    replace_file(folder / "queries.csv", csv_bytes(COLUMNS, _rows(scores, queries, gallery)))
    rows = [
        (
            _found(queries, query),
            float(scores.best_known_precision[query]),
            [_found(gallery, place) for place in scores.nearest[query].tolist()],
        )
        for query in chosen_queries(scores)
    ]
    replace_file(folder / "neighbours.png", png(draw_neighbours(rows, LIGHT), dpi=110))
    RunFolder(folder).write_bad_images(bad)


def _found(side: Side, place: int) -> Found:
    images, embeddings = side
    label = images.classes[int(embeddings.labels[place])]
    return Found(label, thumbnail(images, int(embeddings.ids[place])))


def _rows(scores: Scores, queries: Side, gallery: Side) -> Iterator[list[object]]:
    (images, asked), (searched, found) = queries, gallery
    for query, (i, label) in enumerate(zip(asked.ids.tolist(), asked.labels.tolist(), strict=True)):
        nearest = int(scores.nearest[query, 0])
        has_any = scores.matches[query] > 0
        whole = scores.precision
        yield [
            images.name(i),
            images.classes[label],
            int(scores.matches[query]),
            int(scores.first_match[query]) or "",
            f"{whole[query]:.6g}" if has_any and whole is not None else "",
            f"{scores.precision_at_r[query]:.6g}" if has_any else "",
            searched.name(int(found.ids[nearest])),
            searched.classes[int(found.labels[nearest])],
        ]
