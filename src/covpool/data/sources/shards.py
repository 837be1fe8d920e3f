"""Tar shards with an index, as ``covpool shard`` writes them: in one folder, or in one per split."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from covpool.data.image_set import ImageSet
from covpool.data.sources import SPLITS, Split, tars
from covpool.errors import UsageError
from covpool.wording import counted

LOGGER = logging.getLogger("covpool")
INDEX = "index.json"


def recognizes(path: str) -> bool:
    """Recognize an index, in the folder or in one of a local split."""
    if "://" not in path:
        return bool(_folders(Path(path)))
    from covpool.data.shards.remote import has_index  # here, because the import of fsspec takes a while

    return has_index(path)


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
    """Open the shards of each split.

    Args:
        path: a folder or a URL.
        cache: a local folder for shards in object storage.
    """
    from covpool.data.shards.reader import open_shards

    places: Mapping[Split, str | Path] = _urls(path) if "://" in path else _folders(Path(path))
    if not places:
        raise UsageError(f"{path} has no {INDEX}: 'covpool shard' writes shards and their index")
    return {split: open_shards(place, cache=cache) for split, place in places.items()}


def open_unlabeled(path: str) -> ImageSet:
    """Open the shards of one folder by their index; those of splits as plain tars, whose ids are unique."""
    from covpool.data.shards.reader import open_shards

    if "://" not in path and not _has_index(Path(path)):
        return tars.open_unlabeled(path)
    shards = open_shards(path)
    if shards.index.left_out:
        message = (
            f"{path}: its index.json is without {counted(shards.index.left_out, 'sample')} that "
            "have no label or no image. Remove index.json from a local folder to read all images"
        )
        if not len(shards):
            raise UsageError(message)
        LOGGER.warning(message)
    return shards


def _urls(url: str) -> dict[Split, str]:
    from covpool.data.shards.remote import has_index

    url = url.rstrip("/")
    if has_index(url):
        return {"train": url}
    return {split: f"{url}/{split}" for split in SPLITS if has_index(f"{url}/{split}")}


def _folders(path: Path) -> dict[Split, Path]:
    if _has_index(path):
        return {"train": path}
    return {split: path / split for split in SPLITS if _has_index(path / split)}


def _has_index(path: Path) -> bool:
    # Other programs write an index.json too.
    return (path / INDEX).is_file() and next(path.glob("*.tar"), None) is not None
