"""Explain the predictions of a bundle for some images of a data set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.remote import is_image
from covpool.data.sources import open_splits
from covpool.data.sources.folder import folders_with_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.drawing import png
from covpool.durable import replace_file
from covpool.errors import BadImageError, UsageError
from covpool.explain.evidence import Evidence, explain_features
from covpool.explain.figures import Explained, draw_against, draw_classes, draw_pairs, draw_sheet, seen
from covpool.functional.arguments import check_whole, did_you_mean
from covpool.models.bundle import load_model
from covpool.models.model import PooledClassifier


class SomeImage(NamedTuple):
    """Its name, its class where that is known, and the bytes of its file."""

    name: str
    label: str | None
    content: bytes


def some_images(data: str | Path, limit: int) -> Iterator[SomeImage]:
    """At most so many.

    Args:
        data: an image, a folder of images, or a collection as for ``covpool train``, whose last split is
            taken: test where there is one.
        limit: of images.
    """
    path = Path(data)
    if path.is_file() and is_image(path.name):
        yield SomeImage(path.name, None, path.read_bytes())
        return
    loose = sorted(one for one in path.iterdir() if is_image(one.name)) if path.is_dir() else []
    # Beside folders of classes they are no part of the collection.
    if loose and not any(True for _ in folders_with_images(path)):
        yield from (SomeImage(one.name, None, one.read_bytes()) for one in loose[:limit])
        return
    images: ImageSet = list(open_splits(data).values())[-1]
    # Spread over the set: a folder by class would show its first class alone.
    shown = min(limit, len(images))
    for i in (k * len(images) // shown for k in range(shown)):
        yield SomeImage(images.name(i), images.classes[images.label(i)], images.read(i))


SHEET = 24


@dataclass(frozen=True)
class Explanation:
    """What was written.

    Attributes:
        folder: with everything in it.
        images: how many are explained.
        bad: how many could not be read.
        kind: ``exact``, or ``gradient``.
        largest_gap: of all maps, how far their sums are from the logits, over the sum of what places add.
    """

    folder: Path
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
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Explanation:
    """Explain an image, or the first few of a collection.

    Args:
        bundle: the folder of a trained model.
        data: an image, a folder of images, or a collection as for ``covpool train``, whose last split is
            taken.
        out: the folder for figures and ``maps.json``.
        top: as many classes, the likeliest ones.
        classes: these in their place, by name.
        against: also draw why the likeliest class, and not this one, where that is another.
        pairs: also draw which two places agree.
        limit: of images.
        progress: told how many are done, of how many.

    Raises:
        ValueError: in a sentence, if a class or the images are not what they should be.
    """
    check_whole("top", top)
    check_whole("limit", limit)
    model = load_model(bundle).eval()
    names = class_names(model)
    wanted = [_number(names, name) for name in classes]
    rival = None if against is None else _number(names, against)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    images = list(some_images(data, limit))
    made, rows, bad = [], [], 0
    for number, (name, label, content) in enumerate(images, 1):
        progress(number, len(images))
        try:
            one = explained(model, content, name, label, wanted, rival, top=top, pairs=pairs)
        except BadImageError:
            bad += 1
            continue
        made.append(one)
        _draw(one, out / f"{number:03d}-{_short(Path(name).stem)}", rival, pairs)
        rows += [{"image": name, "class": names[found.label], **_numbers(found)} for found in one.found]
    if not made:
        told = f"none of its images can be read, of {bad}" if bad else "there is no image in it"
        raise UsageError(f"{data} cannot be explained: {told}; covpool check tells what is wrong with images")
    if len(made) > 1:
        replace_file(out / "sheet.png", png(draw_sheet(made)))
    replace_file(out / "maps.json", (json.dumps(rows, indent=1) + "\n").encode())
    gap = max(float(row["gap"]) for row in rows)  # type: ignore[arg-type]
    return Explanation(out, len(made), bad, made[0].found[0].kind, gap)


def _short(name: str) -> str:
    """Of a name as long as a file's may be, what leaves room for a number and an ending."""
    return os.fsencode(name)[:100].decode("utf-8", "ignore")


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
    """One image with the maps of some classes, or of the likeliest, and of a rival."""
    preprocessing = Preprocessing.of(model.pretrained_cfg)
    image: Tensor = evaluation_transform(preprocessing)(decode(content))
    image = image.to(next(model.parameters()).device)
    model.eval()
    with torch.no_grad():
        features = model.forward_features(image[None])
        likely = model.forward_head(features)[0].argsort(descending=True).tolist()
    chosen = list(classes) or likely[:top]
    # One class against another is the likeliest against it.
    extra = [] if rival is None else [one for one in (likely[0], rival) if one not in chosen]
    found = explain_features(model, features, [*chosen, *extra], pairs=pairs)
    return Explained(name, seen(image, preprocessing), tuple(found), class_names(model), likely[0], label)


def class_names(model: PooledClassifier) -> tuple[str, ...]:
    """Those of the bundle, or numbers."""
    return model.classes or tuple(str(i) for i in range(model.num_classes))


def gap(one: Evidence) -> float:
    """How far the sum of a map and the rest is from the logit, over what places add in absolute value."""
    parts = [one.places] + ([] if one.first_order is None else [one.first_order])
    total = sum(float(part.double().sum()) for part in parts) + one.rest
    size = sum(float(part.double().abs().sum()) for part in parts)
    return abs(total - one.logit) / (size or 1.0)


def _draw(one: Explained, beginning: Path, rival: int | None, pairs: bool) -> None:
    replace_file(beginning.with_name(f"{beginning.name}.png"), png(draw_classes(one)))
    by_class = {found.label: found for found in one.found}
    first = one.found[0]
    if rival is not None and rival != one.predicted:
        figure = draw_against(one, by_class[one.predicted], by_class[rival])
        replace_file(beginning.with_name(f"{beginning.name}-against.png"), png(figure))
    if pairs and first.pairs is not None:
        replace_file(beginning.with_name(f"{beginning.name}-pairs.png"), png(draw_pairs(one, first)))


def _numbers(one: Evidence) -> dict[str, object]:
    first = None if one.first_order is None else one.first_order.tolist()
    kept = {"logit": one.logit, "kind": one.kind, "rest": one.rest, "gap": gap(one)}
    return {**kept, "places": one.places.tolist(), "first_order": first}


def _number(names: tuple[str, ...], name: str) -> int:
    if name not in names:
        raise UsageError(f"the bundle has no class {name!r}{did_you_mean(name, names)}")
    return names.index(name)
