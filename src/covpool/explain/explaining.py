"""Explain the predictions of a bundle on some images: figures, and maps as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from covpool.arguments import check_whole, did_you_mean
from covpool.data.decode import decode
from covpool.data.listing import is_image, is_visible
from covpool.data.sources import is_pattern, open_splits, open_unlabeled
from covpool.data.sources.folder import folders_with_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.drawing import png
from covpool.errors import BadImageError, UsageError
from covpool.explain.evidence import Evidence, explain_features
from covpool.explain.evidence_figures import (
    Explained,
    draw_against,
    draw_classes,
    draw_pairs,
    draw_sheet,
    seen,
)
from covpool.models.bundle import load_model
from covpool.models.model import PooledClassifier
from covpool.storage.address import read_image
from covpool.storage.files import replace_file

# Classes that an error lists.
LISTED = 30
SHEET = 24


@dataclass(frozen=True)
class Explanation:
    """A summary of the written files.

    Attributes:
        folder: folder of the files.
        figure: the figure to look at first: all images on a sheet, or the only one.
        images: number of explained images.
        bad: number of unreadable images.
        kind: ``exact``, or ``gradient``.
        largest_gap: largest :func:`gap` of a map.
    """

    folder: Path
    figure: Path
    images: int
    bad: int
    kind: str
    largest_gap: float


def explain_images(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    top: int = 3,
    classes: Sequence[str] = (),
    against: str | None = None,
    pairs: bool = False,
    limit: int = SHEET,
    device: str = "auto",
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Explanation:
    """Explain an image, or some images of a data set.

    Raises:
        UsageError: if a class does not exist, or no image is readable.
    """
    check_whole("top", top)
    check_whole("limit", limit)
    model = load_model(bundle, device=device).eval()
    names = class_names(model)
    labels = [_number(names, name) for name in classes]
    rival = None if against is None else _number(names, against)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    images = list(some_images(data, limit))
    all_explained, rows, bad = [], [], 0
    for number, (name, label, content) in enumerate(images, 1):
        progress(number, len(images))
        try:
            image = explained(model, content, name, label, labels, rival, top=top, pairs=pairs)
        except BadImageError:
            bad += 1
            continue
        all_explained.append(image)
        figure = _draw(image, out / f"{number:03d}-{_short(Path(name).stem)}", rival, pairs)
        rows += [{"image": name, "class": names[each.label], **_numbers(each)} for each in image.evidence]
    if not all_explained:
        reason = "none of its images is readable" if bad else "it contains no image"
        raise UsageError(f"{data} cannot be explained: {reason}. Run covpool check to see why.")
    if rival is not None and all(image.predicted == rival for image in all_explained):
        raise UsageError(
            f"--against {names[rival]}: that is the most probable class itself, so there is nothing to "
            "compare: use another class"
        )
    if len(all_explained) > 1:
        figure = out / "sheet.png"
        replace_file(figure, png(draw_sheet(all_explained)))
    replace_file(out / "maps.json", (json.dumps(rows, indent=1) + "\n").encode())
    largest = max(float(row["difference"]) for row in rows)  # type: ignore[arg-type]
    return Explanation(out, figure, len(all_explained), bad, all_explained[0].evidence[0].kind, largest)


def explained(
    model: PooledClassifier,
    content: bytes,
    name: str,
    label: str | None = None,
    classes: Sequence[int] = (),
    rival: int | None = None,
    *,
    top: int = 3,
    pairs: bool = False,
) -> Explained:
    """Explain one image for some classes, or for its top-k predictions, and for a rival class."""
    preprocessing = Preprocessing.of(model.pretrained_cfg)
    image: Tensor = evaluation_transform(preprocessing)(decode(content))
    image = image.to(next(model.parameters()).device)
    model.eval()
    with torch.no_grad():
        features = model.forward_features(image[None])
        likely = model.forward_head(features)[0].argsort(descending=True).tolist()
    chosen = list(classes) or likely[:top]
    # The rival is compared with the predicted class, so both are needed.
    extra = [] if rival is None else [k for k in (likely[0], rival) if k not in chosen]
    evidence = explain_features(model, features, [*chosen, *extra], pairs=pairs)
    return Explained(name, seen(image, preprocessing), tuple(evidence), class_names(model), likely[0], label)


class SomeImage(NamedTuple):
    """The name, the class if it is known, and the bytes of an image file."""

    name: str
    label: str | None
    content: bytes


def some_images(data: str | Path, limit: int) -> Iterator[SomeImage]:
    """Read some images."""
    path = Path(data)
    if is_pattern(data):
        named = open_unlabeled(data)
        yield from (SomeImage(named.name(i), None, named.read(i)) for i in range(min(limit, len(named))))
        return
    if path.is_file() and is_image(path.name):
        yield SomeImage(path.name, None, read_image(str(path)))
        return
    files = path.iterdir() if path.is_dir() else ()
    loose = sorted(file for file in files if is_image(file.name) and is_visible(file.name))
    # Images next to folders of classes are no part of the data set.
    if loose and not any(True for _ in folders_with_images(path)):
        yield from (SomeImage(file.name, None, read_image(str(file))) for file in loose[:limit])
        return
    images = list(open_splits(data).values())[-1]
    # Spread over the set: the first images may all be of one class.
    shown = min(limit, len(images))
    for i in (k * len(images) // shown for k in range(shown)):
        yield SomeImage(images.name(i), images.classes[images.label(i)], images.read(i))


def class_names(model: PooledClassifier) -> tuple[str, ...]:
    """Return the class names of the bundle, or numbers."""
    return model.classes or tuple(str(i) for i in range(model.num_classes))


def difference(evidence: Evidence) -> float:
    """Return the difference of a map's sum from the logit, relative to its absolute contributions."""
    parts = [evidence.positions] + ([] if evidence.first_order is None else [evidence.first_order])
    total = sum(float(part.double().sum()) for part in parts) + evidence.rest
    size = sum(float(part.double().abs().sum()) for part in parts)
    return abs(total - evidence.logit) / (size or 1.0)


def _short(name: str) -> str:
    """Shorten a file name to 100 bytes, to leave room for a number and a suffix."""
    return os.fsencode(name)[:100].decode("utf-8", "ignore")


def _draw(explained: Explained, beginning: Path, rival: int | None, pairs: bool) -> Path:
    """Draw an image's figures; return the first."""
    classes = beginning.with_name(f"{beginning.name}.png")
    replace_file(classes, png(draw_classes(explained)))
    by_class = {evidence.label: evidence for evidence in explained.evidence}
    first = explained.evidence[0]
    if rival is not None and rival != explained.predicted:
        figure = draw_against(explained, by_class[explained.predicted], by_class[rival])
        replace_file(beginning.with_name(f"{beginning.name}-against.png"), png(figure))
    if pairs and first.pairs is not None:
        replace_file(beginning.with_name(f"{beginning.name}-pairs.png"), png(draw_pairs(explained, first)))
    return classes


def _numbers(evidence: Evidence) -> dict[str, object]:
    first = None if evidence.first_order is None else evidence.first_order.tolist()
    kept = {"logit": evidence.logit, "kind": evidence.kind, "rest": evidence.rest}
    kept |= {"difference": difference(evidence)}
    return {**kept, "positions": evidence.positions.tolist(), "first_order": first}


def _number(names: tuple[str, ...], name: str) -> int:
    if name in names:
        return names.index(name)
    near = [i for i, known in enumerate(names) if _plain(known) == _plain(name)]
    if len(near) == 1:
        return near[0]
    some = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED:,} others" if len(names) > LISTED else "")
    hint = did_you_mean(name, names) or f"; its classes are {some}"
    raise UsageError(f"the bundle has no class {name!r}{hint}")


def _plain(name: str) -> str:
    """Return the name of a class without its number, and without case, spaces and punctuation.

    Example:
        >>> _plain("118.House_Sparrow"), _plain("house sparrow")
        ('housesparrow', 'housesparrow')
    """
    return re.sub(r"[\W_]", "", re.sub(r"^\d+[\W_]+", "", name)).casefold()
