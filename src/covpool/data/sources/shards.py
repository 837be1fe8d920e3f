"""Tar shards with an index, as ``covpool shard`` writes them: in one folder, or in one a split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from covpool.data.image_set import ImageSet
from covpool.data.sources.listing import SPLITS, Split
from covpool.errors import UsageError

INDEX = "index.json"


def recognises(path: str | Path) -> bool:
    """By an index, in the folder or in one of a split; an address, as ``s3://bucket/birds``, is of shards."""
    return "://" in str(path) or bool(_folders(Path(path)))


def read(path: str | Path, cache: str | Path | None = None) -> Mapping[Split, ImageSet]:
    """Open every split.

    Args:
        path: a folder or an address.
        cache: a local folder for the shards of a store.
    """
    from covpool.data.shards.reader import open_shards  # here, because fsspec is for shards alone

    places: Mapping[Split, str | Path] = _addresses(str(path)) if "://" in str(path) else _folders(Path(path))
    if not places:
        raise UsageError(f"{path} has no {INDEX}: 'covpool shard' writes shards and their index")
    return {split: open_shards(place, cache=cache) for split, place in places.items()}


def _addresses(url: str) -> dict[Split, str]:
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
    # The name alone may be another's.
    return (path / INDEX).is_file() and next(path.glob("*.tar"), None) is not None
