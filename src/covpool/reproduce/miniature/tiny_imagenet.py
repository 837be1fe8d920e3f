"""A part of Tiny-ImageNet, as a table of images that the data room reads: nothing is copied."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from covpool.durable import replace_file
from covpool.errors import UsageError
from covpool.train.run_folder import csv_bytes

# Of the choice of classes, the same in every experiment.
SEED = 0
LINK = "tiny-imagenet-200"


def write_subset(folder: Path, classes: int, file: Path) -> None:
    """List train and val of some classes, chosen by a fixed seed, of ``tiny-imagenet-200`` as it is shipped.

    Raises:
        ValueError: if the folder is something else, or has fewer classes.
    """
    try:
        known = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
        lines = (folder / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} is not Tiny-ImageNet, there is no {error.filename}: give --data the folder "
            "tiny-imagenet-200 with wnids.txt, train and val"
        ) from error
    if classes > len(known):
        raise UsageError(f"{folder} has {len(known)} classes, fewer than {classes}")
    chosen = set(random.Random(SEED).sample(known, classes))
    file.parent.mkdir(parents=True, exist_ok=True)
    # By a link beside the table: names stay the same where the images are moved, and runs go on.
    link = file.with_name(LINK)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve())
    rows = [*_train(folder, sorted(chosen)), *_val(lines, chosen)]
    replace_file(file, csv_bytes(("path", "label", "split"), rows))


def _train(folder: Path, classes: list[str]) -> Iterator[tuple[str, str, str]]:
    for name in classes:
        for image in sorted((folder / "train" / name / "images").iterdir()):
            yield f"{LINK}/train/{name}/images/{image.name}", name, "train"


def _val(lines: list[str], classes: set[str]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        image, name, *_ = line.split("\t")
        if name in classes:
            yield f"{LINK}/val/images/{image}", name, "val"
