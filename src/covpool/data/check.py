"""What is wrong with a collection of images, before anything is trained on it. Files are only read.

Equal images are found by their bytes, and by their pixels where other metadata or a lossless format hides
that they are equal. A copy that was scaled or compressed anew is another image here.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from covpool.data.collection import Collection, Problem, Progress
from covpool.data.image_set import ImageSet, class_counts
from covpool.data.sources.layouts import layout_of, read_splits
from covpool.data.sources.listing import Split
from covpool.data.strays import strays

# Every kind of problem, the worst first, and what to do about it.
REMEDIES = {
    "unreadable": "fetch them again, or delete them",
    "truncated": "fetch them again, or delete them",
    "too large": "make them smaller, or delete them",
    "format": "convert them to JPEG or PNG",
    "missing": "fetch them, or take them off the list",
    "leak": "delete them from one of the splits, or the score is too good",
    "two labels": "delete them where they do not belong",
    "duplicate": "delete all but one",
    "black": "delete them, or save them brighter: grey of 16 bits is divided by 256, whatever part it uses",
    "extension": "rename them; covpool reads them as they are, other programs may not",
    "not read": "rename or convert them, or they are not used",
    "no class": "move them into the folder of a class, or they are not used",
    "empty class": "add images, or remove the class",
    "single image": "add images: nothing general can be learned from one",
}


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        layout: of the collection.
        images: how many each split has.
        classes: how many there are.
        problems: the worst first.
    """

    layout: str
    images: Mapping[Split, int]
    classes: int
    problems: tuple[Problem, ...] = field(repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each problem, the worst first."""
        counts = Counter(problem.problem for problem in self.problems)
        return {problem: counts[problem] for problem in REMEDIES if counts[problem]}


def check(
    path: str | Path, layout: str = "auto", *, workers: int | None = None, progress: Progress | None = None
) -> Report:
    """Look at every image of a collection.

    Args:
        path: as for :func:`covpool.data.sources.open_images`.
        layout: likewise.
        workers: threads, of which Pillow makes good use; as many as there are cores if not given.
        progress: is called with the number of images done, and of all.

    Raises:
        ValueError: if it is no collection, or has no images.
    """
    layout = layout_of(path) if layout == "auto" else layout
    sets = read_splits(path, layout)
    total = sum(map(len, sets.values()))
    if not total:
        raise ValueError(f"{path} has no images")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1; got {workers}")
    collection = Collection(sets)
    # Pillow's warnings of odd metadata would come by the thousand, and name no file.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problems = [*collection.look_at_all(workers or _cores(), progress), *collection.same()]
    problems += _class_problems(sets)
    if layout == "folder":
        problems += [Problem(*stray) for stray in strays(Path(path))]
    rank = {problem: place for place, problem in enumerate(REMEDIES)}
    problems.sort(key=lambda problem: rank[problem.problem])
    classes = len(next(iter(sets.values())).classes)
    counts = {split: len(images) for split, images in sets.items()}
    return Report(layout, counts, classes, tuple(problems))


def _class_problems(sets: Mapping[Split, ImageSet]) -> Iterator[Problem]:
    for split, images in sets.items():
        for name, count in zip(images.classes, class_counts(images).tolist(), strict=True):
            if not count:
                yield Problem(f"{split}/{name}", "empty class", f"the class has no image in {split}")
            elif count == 1 and split == "train":
                yield Problem(f"{split}/{name}", "single image", f"the class has one image in {split}")


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
