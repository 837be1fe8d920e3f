"""A bundle and images to a diagnosis on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from covpool.data.bad_image import BadImageError
from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.drawing.theme import png
from covpool.durable.replacing import replace_file
from covpool.explain.diagnosis.measuring import Diagnosis, diagnose
from covpool.explain.diagnosis.picture import draw
from covpool.explain.diagnosis.words import warnings
from covpool.explain.some_images import some_images
from covpool.functional.arguments import check_whole
from covpool.models.bundles.bundle import load_model
from covpool.models.bundles.strict_json import plain_json


def diagnose_images(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    limit: int = 64,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Diagnosis:
    """Diagnose a bundle by some images; ``diagnosis.json`` and ``diagnosis.png`` are in ``out``."""
    check_whole("limit", limit)
    model = load_model(bundle).eval()
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    files = list(some_images(data, limit))

    def images() -> Iterator[Tensor]:
        for file in files:
            try:
                yield transform(decode(file.content))
            except BadImageError:
                continue

    found = diagnose(model, images(), lambda done: progress(done, len(files)))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    told = {**asdict(found), "warnings": warnings(found)}
    replace_file(
        out / "diagnosis.json", (json.dumps(plain_json("diagnosis", told), indent=1) + "\n").encode()
    )
    replace_file(out / "diagnosis.png", png(draw(found)))
    return found
