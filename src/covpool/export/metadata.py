"""What a file says of itself: its classes, what it wants of images, and how it was trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from covpool import __version__
from covpool.data.transforms import Preprocessing
from covpool.export.graph import INPUT, OUTPUT, Traced
from covpool.models.bundles.card import Card
from covpool.models.bundles.strict_json import plain_json

# The same, in JSON, beside the files.
FILE = "model.json"


def describe(card: Card, traced: Traced, *, takes_pixels: bool) -> dict[str, Any]:
    """All that whoever uses a file has to know.

    ``preprocessing`` has what is to be done with an image that is upright and RGB: resize its shorter side to
    ``resize`` (or both, if ``crop_mode`` is squash), cut out the centre of ``size``, and where ``in_graph``
    is false also divide by 255, subtract ``mean`` and divide by ``std``.
    """
    preprocessing = Preprocessing.of(card.preprocessing)
    size = [None, None] if traced.has_free_size else [preprocessing.size] * 2
    described = {
        "classes": card.classes,
        "preprocessing": {
            **dataclasses.asdict(preprocessing),
            "resize": preprocessing.resized_side,
            "in_graph": takes_pixels,
        },
        "input": {
            "name": INPUT,
            "type": "uint8" if takes_pixels else "float32",
            "shape": [None, *size, 3] if takes_pixels else [None, 3, *size],
        },
        "output": {"name": OUTPUT, "type": "float32", "shape": [None, card.config.num_classes]},
        "config": card.config.to_dict(),
        "recipe": card.recipe,
        "bundle": {"sha256": card.sha256, "versions": card.versions},
        "covpool": __version__,
    }
    return dict(plain_json("metadata", described))


def as_strings(described: dict[str, Any]) -> dict[str, str]:
    """A string of JSON for each key, which is what files take."""
    return {name: json.dumps(value, ensure_ascii=False) for name, value in described.items()}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What an exported ``.onnx`` or ``.pt2`` says of itself.

    Raises:
        ValueError: if it is not one that covpool has exported.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(2, "No such file", str(path))
    found = _of_torch(path) if path.suffix == ".pt2" else _of_onnx(path)
    if not found.get("covpool"):
        raise ValueError(f"{path} was not exported by covpool: it says nothing of classes")
    return {name: json.loads(text) for name, text in found.items()}


def _of_onnx(path: Path) -> dict[str, str]:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"{path} is no ONNX file") from error
    return {entry.key: entry.value for entry in model.metadata_props}


def _of_torch(path: Path) -> dict[str, str]:
    import torch

    wanted = dict.fromkeys(
        ("classes", "preprocessing", "input", "output", "config", "recipe", "bundle", "covpool"), ""
    )
    try:
        torch.export.load(path, extra_files=wanted)
    except Exception as error:  # of whatever a broken archive leads to
        raise ValueError(f"{path} is no file of torch.export") from error
    return wanted
