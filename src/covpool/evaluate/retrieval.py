"""Measure retrieval by a bundle's embeddings: recall at k and mAP."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from covpool.arguments import Device, check_choice, check_whole
from covpool.data.image_set import ImageSet
from covpool.data.sources import evaluation_split, open_images, split_names, splits
from covpool.device import available_cores
from covpool.errors import UsageError
from covpool.evaluate.results import (
    Results,
    begin_results,
    describe_images,
    new_results,
    prepare_folder,
    write_results,
)
from covpool.evaluate.search import Scores, Side, embed, score, search_exact, search_faiss, taken_from
from covpool.inference.forward import Pass, ProgressCall, open_bundle
from covpool.processes import joined_processes
from covpool.terminal import counted


def results_table(results: Results) -> str:
    """Return one line per metric, in percent."""
    data, gallery, metrics = results["data"], results["gallery"], results["metrics"]
    among = (
        "the others" if gallery is None else f"{counted(gallery['images'], 'image')} of {gallery['split']}"
    )
    title = (
        f"{counted(results['queries'], 'image')} of {data['split']} searched for their class among {among}"
    )
    if without := results["queries_without_match"]:
        title += f"; {without:,} more have none to find"
    shares = {f"recall at {k}": share for k, share in metrics["recall"].items()}
    shares |= {"mAP": metrics["map"], "mAP at R": metrics["map_at_r"]}
    lines = [f"{name:<14} {100 * share:6.1f}" for name, share in shares.items() if share is not None]
    return "\n".join([title, "", f"{'':<14} {'%':>6}", *lines])


PROTOCOL = "retrieval"
ENGINES = ("exact", "faiss")
# Nearest neighbors to store, for the figures.
NEAREST = 6


@dataclass(frozen=True, eq=False)
class Retrieval:
    """The result of :func:`retrieve`.

    Attributes:
        folder: folder of the output files, including ``results.json``.
        results: contents of ``results.json``; ``metrics`` are fractions from 0 to 1.
    """

    folder: Path
    results: Results


def retrieve(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    split: str | None = None,
    gallery: str | None = None,
    layout: str = "auto",
    at: Sequence[int] = (1, 2, 4, 8),
    engine: Literal["exact", "faiss"] = "exact",
    batch_size: int = 64,
    workers: int = 2,
    device: Device = "auto",
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    progress: ProgressCall | None = None,
) -> Retrieval:
    """Measure how well a bundle's embeddings retrieve images of the same class, and write the results.

    The embedding of an image is the input of the bundle's classifier; embeddings are compared by cosine
    similarity. The images need not belong to the bundle's classes. Under torchrun all processes call this
    function and share the images; the first process searches.

    Args:
        bundle: folder written by :func:`covpool.save_model`.
        data: the images, as for :func:`covpool.data.sources.open_images`.
        out: a new folder, or that of an earlier search.
        split: split of the queries (default: test, else val, else all images).
        gallery: split to search (default: that of the queries). A query that is in the gallery is excluded
            from its own ranking.
        layout: format of the data, as for :func:`covpool.data.sources.open_images`.
        at: values of k for recall at k.
        engine: ``"exact"`` or ``"faiss"``. faiss is exact too, but ranks only the images that recall and mAP
            at R (mAP over the first R ranks, for a query with R matches) need. It does not report mAP.
        batch_size: batch size per process.
        workers: number of processes that read images, for each process of torchrun.
        device: device of the network; ``"auto"`` uses a GPU if there is one. The search runs on the CPU.
        precision: autocast precision.
        progress: called with the number of images done and the total, for each split.

    Raises:
        ValueError: if bundle, images and options do not match.
    """
    bundle, data, folder = str(bundle), str(data), Path(out)
    check_choice("engine", engine, ENGINES)
    passing = Pass(batch_size, workers, precision, progress)
    if not at:
        raise UsageError("--at is empty: pass at least one k, such as [1]")
    for k in at:
        check_whole("at", k)
    if engine == "faiss" and find_spec("faiss") is None:
        raise UsageError("--engine faiss needs faiss: pip install 'covpool[faiss]'")
    split = split or evaluation_split(data, layout)
    _check_gallery(gallery, data, layout)
    separate = _other_gallery(split, gallery)
    arguments = {"bundle": bundle, "data": data, "layout": layout, "at": list(at), "engine": engine}
    with joined_processes(device) as processes:
        started = time.monotonic()
        processes.by_first(lambda: prepare_folder(folder, PROTOCOL, data))
        model = processes.together(lambda: open_bundle(bundle, processes.device))

        def opened(name: str) -> ImageSet:
            return processes.together(lambda: open_images(data, name, layout))

        def side(name: str) -> Side:
            images = opened(name)
            return Side(name, images, embed(model, images, passing, processes))

        searched = None if separate is None else side(separate)
        is_part = searched is not None and set(split_names(split)) < set(split_names(searched.split))
        asked = opened(split) if is_part else side(split)

        def finish() -> Results:
            from covpool.evaluate.figures import write_files  # here: matplotlib takes seconds to import

            itself = None
            if isinstance(asked, Side):
                queries = asked
            else:
                assert searched is not None
                queries, itself = taken_from(searched, split, asked)
            with _all_cores() if processes.world_size > 1 else contextlib.nullcontext():
                scores = _search(queries, searched, itself, at, engine)
            results = new_results(PROTOCOL, arguments | passing.described(), processes, seed=None)
            results |= _described(queries, searched) | _measured(scores, at)
            begin_results(folder, PROTOCOL)
            write_files(folder, scores, queries, searched)
            results["seconds"] = time.monotonic() - started
            write_results(folder, results)
            return results

        return Retrieval(folder, processes.by_first(finish))


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Use all cores while the other processes wait; torchrun gives each process one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(available_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _described(queries: Side, gallery: Side | None) -> dict[str, Any]:
    return {
        "data": describe_images(queries.images, queries.split),
        "gallery": gallery and describe_images(gallery.images, gallery.split),
        "vector_length": queries.embeddings.vectors.shape[1],
        "bad_images": sum(len(side.embeddings.bad) for side in (queries, gallery) if side),
    }


def _check_gallery(gallery: str | None, data: str, layout: str) -> None:
    there = splits(data, layout)
    unknown = [] if gallery is None else [name for name in split_names(gallery) if name not in there]
    if unknown:
        raise UsageError(
            f"--gallery {gallery} is neither a folder of covpool embed nor a split of {data}, which has "
            f"{', '.join(there)}"
        )


def _other_gallery(split: str, gallery: str | None) -> str | None:
    """Return the gallery, or ``None`` if it equals the queries."""
    asked, among = set(split_names(split)), set(split_names(split if gallery is None else gallery))
    if asked & among and asked - among:
        raise UsageError(
            f"only some queries of {split} are in the gallery {gallery}: use a --gallery with all splits of "
            "the queries, or with none"
        )
    return None if asked == among else gallery


def _search(
    queries: Side, gallery: Side | None, itself: NDArray[np.int64] | None, at: Sequence[int], engine: str
) -> Scores:
    asked, among = queries.embeddings, (gallery or queries).embeddings
    if gallery is None:
        itself = np.arange(len(asked.ids))
    ranks = len(among.ids) - int(itself is not None)
    if max(at) > ranks:
        raise UsageError(f"--at {max(at)} is larger than the number of images to search ({ranks})")
    excluded = None if itself is None else torch.from_numpy(itself)
    if engine == "exact":
        blocks = search_exact(asked.vectors, among.vectors, excluded)
    else:
        largest = int(np.bincount(among.labels).max())  # no query has more matches
        blocks = search_faiss(asked.vectors, among.vectors, min(ranks, max(*at, largest, NEAREST)), excluded)
    return score(blocks, asked.labels, among.labels, NEAREST, without_itself=itself is not None)


def _measured(scores: Scores, at: Sequence[int]) -> dict[str, Any]:
    counted = scores.counted
    if not counted.any():
        raise UsageError("no query has another image of its class in the gallery")
    whole = scores.precision
    return {
        "queries": int(counted.sum()),
        "queries_without_match": int((~counted).sum()),
        "metrics": {
            "recall": {str(k): scores.recall(k) for k in at},
            "map": None if whole is None else float(whole[counted].mean()),
            "map_at_r": float(scores.precision_at_r[counted].mean()),
        },
    }
