"""The card of a bundle: everything but the weights, in JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch

from covpool import __version__
from covpool.errors import BundleError
from covpool.models.config import ModelConfig
from covpool.models.strict_json import check_types, parse, plain_json, reason, shown

CARD = "covpool.json"
WEIGHTS = "model.safetensors"
FORMAT = "covpool"
FORMAT_VERSION = 1
# The oldest covpool that reads this version of the format.
READABLE_BY = "0.1.0"
# Names for a hundred thousand classes take 3 MB. JSON of many tiny lists takes 20 times its size in memory.
MAX_BYTES = 16 * 2**20
# A larger number among the options (a depth, a size) is no network but an attempt to fill the memory.
MAX_OPTION = 2**16
# Options that fill nothing, however large.
NO_SIZES = ("seed", "limit")

# A network of timm, with or without the name of pretrained weights.
PLAIN_NAME = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)?"
FLOATS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Card:
    """What is known of a saved model.

    Attributes:
        config: what it is made of.
        classes: the classes' names, or ``None``.
        preprocessing: of its images: ``input_size``, ``interpolation``, ``mean``, ``std``, ``crop_pct``,
            ``crop_mode``, as timm has them.
        metrics: what was measured, as told to ``save_model``.
        recipe: how it was trained, as told to ``save_model``.
        versions: of python, torch, timm and covpool when it was saved.
        sha256: of the weights' file.
        bytes: its size.
        buffer_dtypes: of floating buffers that are no part of the weights, where not float32.
    """

    config: ModelConfig
    classes: tuple[str, ...] | None
    preprocessing: dict[str, Any]
    metrics: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    sha256: str
    bytes: int
    buffer_dtypes: dict[str, str]


# The types of the fields as JSON has them: lists for tuples.
_FIELDS: dict[str, Any] = {
    "format": str,
    "format_version": int,
    "written_by": str,
    "readable_by": str,
    "config": dict[str, Any],
    "classes": list[str] | None,
    "preprocessing": dict[str, Any],
    "metrics": dict[str, Any],
    "recipe": dict[str, Any],
    "versions": dict[str, str],
    "weights": dict[str, Any],
    "hash": str,
}
_WEIGHTS_FIELDS: dict[str, Any] = {
    "file": Literal["model.safetensors"],
    "sha256": str,
    "bytes": int,
    "buffer_dtypes": dict[str, Literal["float16", "bfloat16", "float32", "float64"]],
}
_PREPROCESSING_FIELDS: dict[str, Any] = {
    "input_size": list[int],
    "interpolation": str,
    "mean": list[float],
    "std": list[float],
    "crop_pct": float,
    "crop_mode": str,
}
# Options by which timm reads files, fetches weights, or runs a function.
_READING = re.compile(r"pretrained.*|.*_(path|dir|file|url|cfg|fn|filter|cls)|hf_hub_id|cfg|features_only")


def write_card(card: Card) -> bytes:
    """The file's content; it is read back as a check, so what is written can be read.

    Raises:
        BundleError: the card would be refused.
    """
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "written_by": __version__,
        "readable_by": READABLE_BY,
        "config": plain_json("config", card.config.to_dict()),
        "classes": plain_json("classes", card.classes),
        "preprocessing": plain_json("preprocessing", card.preprocessing),
        "metrics": plain_json("metrics", card.metrics),
        "recipe": plain_json("recipe", card.recipe),
        "versions": card.versions,
        "weights": {
            "file": WEIGHTS,
            "sha256": card.sha256,
            "bytes": card.bytes,
            "buffer_dtypes": card.buffer_dtypes,
        },
    }
    fields["hash"] = card_hash(fields)
    data = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    read_fields(data)
    return data


def read_fields(data: bytes) -> Card:
    """A card from the file's content.

    Raises:
        BundleError: with the reason, but not the name of the file.
    """
    fields = parse(data, CARD, MAX_BYTES)
    _check_format(fields)
    if fields.get("hash") != card_hash(fields):
        raise BundleError(
            f"{CARD} was damaged or edited after it was written (its hash differs): copy it anew"
        )
    check_types(CARD, fields, _FIELDS, required=_FIELDS)
    check_types("weights", fields["weights"], _WEIGHTS_FIELDS, required=_WEIGHTS_FIELDS)
    config = _config(fields)
    return Card(
        config=config,
        classes=_classes(fields, config.num_classes),
        preprocessing=_preprocessing(fields),
        metrics=fields["metrics"],
        recipe=fields["recipe"],
        versions=fields["versions"],
        sha256=fields["weights"]["sha256"],
        bytes=fields["weights"]["bytes"],
        buffer_dtypes=fields["weights"]["buffer_dtypes"],
    )


def card_hash(fields: Mapping[str, Any]) -> str:
    """SHA-256 of all fields but ``hash`` itself, in JSON without spaces, ASCII only, keys in order."""
    hashed = {name: value for name, value in fields.items() if name != "hash"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_format(fields: Mapping[str, Any]) -> None:
    if fields.get("format") != FORMAT:
        raise BundleError(
            f"{CARD} is another program's: its format is {shown(fields.get('format'))}, not 'covpool'"
        )
    version = fields.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{CARD} has no valid format_version; got {shown(version)}")
    if version > FORMAT_VERSION:
        writer = _version(fields.get("written_by")) or "of an unknown version"
        reader = _version(fields.get("readable_by"))
        remedy = f"pip install 'covpool>={reader}'" if reader else "pip install --upgrade covpool"
        raise BundleError(
            f"it was written in bundle format {shown(version)} by covpool {writer}; "
            f"this covpool {__version__} reads up to format {FORMAT_VERSION}: {remedy}"
        )


def _version(version: object) -> str | None:
    """A version if it is one: the message ends in a command that people paste into a shell."""
    pattern = r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}((a|b|rc)[0-9]{1,6})?(\.(post|dev)[0-9]{1,6}){0,2}"
    return version if isinstance(version, str) and re.fullmatch(pattern, version) else None


def _config(fields: Mapping[str, Any]) -> ModelConfig:
    values = {"pool_options": {}, "backbone_options": {}, "image_size": None, **fields["config"]}
    check_types("config", values, get_type_hints(ModelConfig), required=("backbone",))
    # timm takes 'hf-hub:...' and 'local-dir:...' too, and would fetch and read what is there.
    if not re.fullmatch(PLAIN_NAME, values["backbone"]):
        raise BundleError(
            f"its backbone {shown(values['backbone'])} is not the plain name of a network of timm"
        )
    for option in values["backbone_options"]:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", option) or _READING.fullmatch(option):
            raise BundleError(f"its backbone_options have {shown(option)}, which no bundle may set")
    for option in ("backbone_options", "pool_options", "image_size"):
        _check_option(option, values[option])
    try:
        return ModelConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        raise BundleError(f"its config is refused: {reason(error)}") from error


def _check_option(name: str, value: object) -> None:
    """Raise unless ``value`` is a name, a number of ordinary size, or lists or a dict of these."""
    if isinstance(value, list | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if key not in NO_SIZES or not isinstance(item, int | float):
                _check_option(name, item)
    elif isinstance(value, str):
        if not re.fullmatch(r"[A-Za-z0-9_.+-]*", value):
            raise BundleError(f"{name} has {shown(value)}, which is no name")
    elif value is not None and not (isinstance(value, int | float) and abs(value) <= MAX_OPTION):
        raise BundleError(f"{name} has {shown(value)}, but nothing in it can be above {MAX_OPTION}")


def _classes(fields: Mapping[str, Any], number: int) -> tuple[str, ...] | None:
    names = fields["classes"]
    if names is not None and len(names) != number:
        raise BundleError(f"it names {len(names)} classes, but its model has {shown(number)}")
    return None if names is None else tuple(names)


def _preprocessing(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With tuples, as timm has it."""
    values = fields["preprocessing"]
    check_types("preprocessing", values, _PREPROCESSING_FIELDS, required=_PREPROCESSING_FIELDS)
    _check_option("preprocessing", values)
    size, mean, std = values["input_size"], values["mean"], values["std"]
    if len(size) != 3 or not mean or len(mean) != len(std) or min(*size, *std, values["crop_pct"]) <= 0:
        raise BundleError(
            "its preprocessing has not three sizes, a std for each mean, and a crop, all above zero"
        )
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
