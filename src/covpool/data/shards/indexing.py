"""The index of tars that are on a disk, written beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from covpool.data.shards.index import (
    INDEX,
    Shard,
    ShardError,
    ShardIndex,
    digest,
    write_contents,
    write_index,
)
from covpool.data.shards.scan import Scan, scan_tar
from covpool.data.sources.listing import SPLITS
from covpool.durable.replacing import replace_file


def index_shards(
    folders: Sequence[Path],
    classes: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[ShardIndex], int]:
    """Make the index of folders of tars, ours or others', anew. The tars are only read.

    Args:
        folders: with the tars; the index of each goes beside them. They have the same classes.
        classes: names, in the order of the labels; if not given, those in the tars, or else the labels.
        progress: is told how many tars are done, and how many there are.

    Returns:
        The index of each, and how many samples were left out because they have no image or no label.
    """
    shards: list[list[Shard]] = []
    left_out: list[int] = []
    told: dict[int, str] = {}
    highest = -1
    tars = [_tars(folder) for folder in folders]
    for folder, names in zip(folders, tars, strict=True):
        shards.append([])
        left_out.append(0)
        for name in names:
            shard, scan = index_tar(folder / name)
            shards[-1].append(shard)
            told.update(scan.classes)
            highest = max(highest, int(scan.contents.labels.max(initial=-1)))
            left_out[-1] += scan.left_out
            progress(sum(map(len, shards)), sum(map(len, tars)))
    if classes is None:
        classes = [told.get(label, str(label)) for label in range(highest + 1)]
    elif len(classes) <= highest:
        raise ShardError(f"there are {len(classes)} names of classes, and labels up to {highest}")
    found = zip(shards, left_out, strict=True)
    indexes = [ShardIndex(tuple(classes), tuple(some), without) for some, without in found]
    for folder, index in zip(folders, indexes, strict=True):
        save_index(folder, index)
    return indexes, sum(left_out)


def index_tar(path: Path) -> tuple[Shard, Scan]:
    """Scan a tar and write what is in it beside it."""
    scan = scan_tar(path)
    data = write_contents(scan.contents)
    replace_file(path.with_name(f"{path.name}.json"), data)
    return Shard(path.name, path.stat().st_size, len(scan.contents.names), digest(data)), scan


def save_index(folder: Path, index: ShardIndex) -> None:
    """Write the index of a folder, after what is in its tars."""
    replace_file(folder / INDEX, write_index(index))


def tar_folders(path: Path) -> list[Path]:
    """The folder itself if it has tars, else those of train, val and test that have some."""
    if _tars(path):
        return [path]
    folders = [path / split for split in SPLITS if (path / split).is_dir() and _tars(path / split)]
    if not folders:
        packed = sorted(file.name for file in path.iterdir() if ".tar." in file.name or file.suffix == ".tgz")
        also = f": {packed[0]} is compressed, unpack it first" if packed else ""
        raise ShardError(f"{path} has no tars{also}")
    return folders


def _tars(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".tar" and path.is_file())
