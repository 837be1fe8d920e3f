"""Search the embeddings that ``covpool embed`` wrote for the images nearest to some photographs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from PIL import Image

from covpool.data.decode import decode
from covpool.data.sources.parquet_file import Open, read_parquet, read_rows
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.drawing import LIGHT, png
from covpool.errors import BadImageError, ShardError, UsageError
from covpool.evaluate.figures import Shown, draw_neighbours
from covpool.explain.explaining import some_images
from covpool.inference import Embed
from covpool.inference.bulk import JOB
from covpool.inference.tasks import Vectors
from covpool.models.bundle import load_model, read_card
from covpool.models.card import bundle_digest
from covpool.storage.address import Address
from covpool.storage.files import json_bytes, read_json, replace_file

# Photographs to search for in one call.
MOST = 24


class Neighbor(NamedTuple):
    """An image of the gallery, and its cosine similarity to the query."""

    id: str
    similarity: float


@dataclass(frozen=True)
class Neighbors:
    """The folder with ``neighbors.json`` and ``neighbors.png``, and the neighbors of each query by name."""

    folder: Path
    neighbors: dict[str, list[Neighbor]]


def is_gallery(folder: str | Path | None) -> bool:
    """Return whether ``covpool embed`` wrote a folder."""
    return folder is not None and (Path(folder) / JOB).is_file()


def find_neighbors(
    bundle: str | Path,
    query: str | Path,
    gallery: str | Path,
    out: str | Path,
    *,
    most: int = 8,
    images: str | Path | None = None,
    device: str = "auto",
) -> Neighbors:
    """Find the images of a gallery that are most similar to photographs.

    Args:
        bundle: the model that the embeddings are of.
        query: a photograph, or a folder of at most 24.
        gallery: a folder of ``covpool embed``.
        out: folder for the results.
        most: number of neighbors of each query.
        images: the folder that ``covpool embed`` read, to draw the neighbors. Without it they are gray: the
            gallery may come from others, and does not choose which files are opened.
        device: ``auto`` uses a GPU if there is one.

    Raises:
        UsageError: if the gallery is of another bundle, or has no Parquet files.
    """
    gallery, out = Path(gallery), Path(out)
    task = _task(gallery, bundle)
    queries = {image.name: image.content for image in some_images(query, MOST + 1)}
    if len(queries) > MOST:
        raise UsageError(f"{query} has more than {MOST} photographs to search for: pass a folder of fewer")
    vectors = _embedded(bundle, task, queries, device)
    ids, similarities = _nearest(vectors, gallery, most)
    neighbors = {
        name: [Neighbor(str(ids[row, k]), float(similarities[row, k])) for k in range(ids.shape[1])]
        for row, name in enumerate(queries)
    }
    out.mkdir(parents=True, exist_ok=True)
    plain = {name: [neighbor._asdict() for neighbor in nearest] for name, nearest in neighbors.items()}
    replace_file(out / "neighbors.json", json_bytes(plain))
    replace_file(out / "neighbors.png", _picture(queries, neighbors, images))
    return Neighbors(out, neighbors)


def _task(gallery: Path, bundle: str | Path) -> Embed:
    """Return how the embeddings of a gallery were computed."""
    job = read_json(gallery / JOB)
    try:
        if job["task"] == "embed" and job["bundle"] == bundle_digest(read_card(bundle)):
            return Embed(**job["options"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{gallery / JOB} is damaged: run covpool embed again, with a new --out") from error
    raise UsageError(f"{gallery} has no embeddings of {bundle}: run covpool embed with this bundle")


def _embedded(bundle: str | Path, task: Embed, queries: dict[str, bytes], device: str) -> NDArray[np.float32]:
    """Return the embeddings of photographs, of length 1, as the gallery has them."""
    model = load_model(bundle, device=device)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    vectors = Vectors(task, model)
    rows = []
    for name, data in queries.items():
        try:
            image = transform(decode(data))[None].to(next(model.parameters()).device)
        except BadImageError as error:
            raise UsageError(f"{name} is unreadable: {error}") from error
        views = [image, image.flip(-1)] if task.flip else [image]
        with torch.inference_mode():
            mean = torch.stack([vectors.forward(view) for view in views]).mean(dim=0)
        rows.append(vectors.columns(mean)["vector"][0].astype(np.float32))
    return _unit(np.stack(rows))


def _nearest(vectors_QD: NDArray[np.float32], gallery: Path, most: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ids and similarities of the nearest images, one file of the gallery at a time."""
    ids = np.empty((len(vectors_QD), 0), dtype=object)
    similarities = np.empty((len(vectors_QD), 0), dtype=np.float32)
    for names, rows_ND in _row_groups(gallery, vectors_QD.shape[1]):
        ids = np.concatenate([ids, np.broadcast_to(names, (len(vectors_QD), len(names)))], axis=1)
        similarities = np.concatenate([similarities, vectors_QD @ _unit(rows_ND).T], axis=1)
        order = np.argsort(-similarities, axis=1, kind="stable")[:, :most]
        ids = np.take_along_axis(ids, order, axis=1)
        similarities = np.take_along_axis(similarities, order, axis=1)
    if not ids.shape[1]:
        raise UsageError(f"{gallery} has no embeddings in Parquet files: run covpool embed --format parquet")
    return ids, similarities


def _row_groups(gallery: Path, width: int) -> Iterator[tuple[NDArray[Any], NDArray[np.float32]]]:
    """Yield ids and vectors of the readable images, one row group at a time."""
    root = Address.of(gallery)
    for file in sorted(path.relative_to(gallery).as_posix() for path in gallery.rglob("*.parquet")):
        for number in range(read_parquet(root, file, lambda opened: opened.parquet.num_row_groups)):
            ids, rows_ND = read_parquet(root, file, partial(_row_group, number, width))
            if len(ids):
                yield ids, rows_ND


def _row_group(number: int, width: int, opened: Open) -> tuple[NDArray[Any], NDArray[np.float32]]:
    schema = opened.parquet.schema_arrow
    if not {"id", "vector"} <= {*schema.names} or not hasattr(schema.field("vector").type, "value_type"):
        raise ShardError(f"{opened.where} has no columns 'id' and 'vector': it is not of covpool embed")
    ids, vectors = (read_rows(opened, number, column) for column in ("id", "vector"))
    is_readable = vectors.is_valid()  # an unreadable image has no vector
    vectors = vectors.filter(is_readable)
    if set(pc.unique(pc.list_value_length(vectors)).to_pylist()) - {width}:
        raise ShardError(f"{opened.where} has vectors that are not of length {width}")
    values = pc.list_flatten(vectors).cast("float32").to_numpy().reshape(-1, width)
    return ids.filter(is_readable).to_numpy(), values


def _unit(rows_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    unit: NDArray[np.float32] = rows_ND / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


def _picture(
    queries: dict[str, bytes], neighbors: dict[str, list[Neighbor]], images: str | Path | None
) -> bytes:
    """Draw each query and its neighbors; gray where the image is not on this machine."""
    folder = None if images is None else Address.of(images)
    rows = [
        (
            Shown(name, decode(data)),
            math.nan,
            [
                Shown(f"{neighbor.similarity:.2f} {Path(neighbor.id).name}", _opened(folder, neighbor.id))
                for neighbor in neighbors[name]
            ],
        )
        for name, data in queries.items()
    ]
    title = "query, and the most similar images of the gallery with their cosine similarity"
    return png(draw_neighbours(rows, LIGHT, title), dpi=110)


def _opened(folder: Address | None, name: str) -> Image.Image | None:
    """Return an image on this machine; its name is from a row, so it stays in the folder of the images."""
    if folder is None:
        return None
    try:
        where = folder.listed(name)
        return decode(where.read()) if where.is_local else None
    except (OSError, UsageError):
        return None
