"""The card of a bundle: everything but the weights, in strict JSON."""

from __future__ import annotations

import json
import math
import platform
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import timm
import torch

from covpool import __version__
from covpool.errors import BundleError, DamagedBundleError, UsageTypeError
from covpool.models.config import ModelConfig
from covpool.models.model import PooledClassifier
from covpool.nn.pooling import is_method, module_of
from covpool.storage.files import Digest, digest
from covpool.terminal import printable


def plain_json(name: str, value: object) -> Any:
    """Return ``value`` as JSON has it: lists for tuples, names for dtypes, ``None`` for NaN and infinities.

    A wrong type is a mistake of the caller and raises. A NaN, or a file name that is not UTF-8, may appear at
    the end of a long training run, and must not cost the model.
    """
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # a file name in another encoding
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [plain_json(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        hint = ": pass its .tolist()" if hasattr(value, "tolist") else ""
        raise UsageTypeError(
            f"{name} must be numbers, strings, lists and dicts; got {type(value).__name__}{hint}"
        )
    for key in value:
        if not isinstance(key, str):
            raise UsageTypeError(f"{name} must have strings as keys; got {key!r}")
    return {key: plain_json(f"{name}[{key!r}]", item) for key, item in value.items()}


def parse(data: bytes, name: str, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the content of a file.

    Raises:
        BundleError: the content is too large, damaged, or not a JSON object.
    """
    if len(data) > max_bytes:
        raise BundleError(f"{name} is larger than {max_bytes // 2**20} MiB")
    try:
        fields = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        # Python's reader accepts NaN, infinities and half surrogate pairs; this writer does not.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise DamagedBundleError(f"{name} is truncated or not JSON: {reason(error)}") from error
    if not isinstance(fields, dict):
        raise BundleError(f"{name} is not a JSON object but {shown(fields)}")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object; Python's reader drops all but the last of equal names."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has two fields of the same name")
    return fields


def shown(value: object) -> str:
    """Return a stranger's value for a message: short, without characters that control a terminal."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, printable."""
    return printable(next(iter(str(error).splitlines()), "") or type(error).__name__)


CARD = "covpool.json"
WEIGHTS = "model.safetensors"
# In place of the weights, if they are in several files.
INDEX = "model.safetensors.index.json"
FORMAT = "covpool"
FORMAT_VERSION = 1
# The oldest covpool that reads this version of the format.
READABLE_BY = "0.1.0"
# Names of a hundred thousand classes take 3 MB. JSON of many tiny lists takes 20 times its size in memory.
MAX_BYTES = 16 * 2**20
# No network has a larger number among its options (a depth, a size).
MAX_OPTION = 2**16
# Pixels of the side to which a bundle may resize images: a stranger's must not fill the memory.
MAX_SIDE = 4096
# The range of a standard deviation, so that normalized pixels stay finite in half precision.
MIN_STD, MAX_MEAN = 1e-3, 1e3
# Channels of an image; hyperspectral cameras have hundreds.
MAX_CHANNELS = 4096
# Options that use no memory, however large.
NO_SIZES = ("seed", "limit")
# A network of timm, with or without the name of pretrained weights: not 'hf-hub:...', which timm would fetch.
PLAIN_NAME = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)?"
# Options by which timm reads files, fetches weights, or calls a function.
_READING = re.compile(r"pretrained.*|.*_(path|dir|file|url|cfg|fn|filter|cls)|hf_hub_id|cfg|features_only")
_PREPROCESSING = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")


@dataclass(frozen=True)
class Card:
    """The description of a saved model.

    Attributes:
        config: the architecture.
        classes: the names of the classes, or ``None``.
        preprocessing: the six fields of ``timm.data.resolve_model_data_config``.
        metrics: the metrics passed to ``save_model``.
        recipe: the recipe passed to ``save_model``.
        versions: the versions of Python, torch, timm and covpool that saved it.
        initial_weights: where the backbone's pretrained weights came from; empty if unknown.
        sha256: the hash of the weights file.
        bytes: the size of the weights file.
        buffer_dtypes: the dtypes of floating-point buffers outside the weights, where not float32.
        file: the weights file; the index of several files for a divided classifier.
        backbone_sha256: see :func:`backbone_digest`.
    """

    config: ModelConfig
    classes: tuple[str, ...] | None
    preprocessing: dict[str, Any]
    metrics: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    initial_weights: dict[str, str]
    sha256: str
    bytes: int
    buffer_dtypes: dict[str, str]
    file: str = WEIGHTS
    backbone_sha256: str = ""


def versions() -> dict[str, str]:
    """Return the versions of the software that builds a network."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "covpool": __version__,
    }


def backbone_digest(model: PooledClassifier) -> str:
    """Return a hash of all that a backbone's features depend on: its weights, architecture and resolution."""
    config = model.config
    facts = (config.backbone.partition(".")[0], config.features, config.keep_resolution)
    options = sorted(config.backbone_options.items())
    digest = Digest(repr((facts, options)).encode())
    for name, tensor in sorted(model.backbone.state_dict().items()):
        if not name.endswith("num_batches_tracked"):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def write_card(card: Card) -> bytes:
    """Return the content of the file, after reading it back as a check.

    Raises:
        BundleError: the card would be refused.
    """
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "written_by": __version__,
        "readable_by": READABLE_BY,
        "config": plain_json("config", card.config.to_dict()),
        "pool_module": module_of(card.config.pool),
        "classes": plain_json("classes", card.classes),
        "preprocessing": plain_json("preprocessing", card.preprocessing),
        "metrics": plain_json("metrics", card.metrics),
        "recipe": plain_json("recipe", card.recipe),
        "versions": card.versions,
        "initial_weights": card.initial_weights,
        "backbone_sha256": card.backbone_sha256,
        "weights": {
            "file": card.file,
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
    """Read a card from the content of the file.

    Raises:
        BundleError: with the reason, without the name of the bundle.
    """
    fields = parse(data, CARD, MAX_BYTES)
    _check_format(fields)
    if fields.get("hash") != card_hash(fields):
        raise DamagedBundleError(
            f"{CARD} was damaged or edited after it was written (its hash differs): copy it again"
        )
    dicts = ("config", "preprocessing", "metrics", "recipe", "versions", "initial_weights", "weights")
    _check_types(CARD, fields, dict.fromkeys(dicts, dict) | {"classes": list | None, "backbone_sha256": str})
    weights = fields["weights"]
    _check_types("weights", weights, {"sha256": str, "bytes": int, "buffer_dtypes": dict})
    _check_pool_module(fields["config"].get("pool"), fields.get("pool_module"))
    config = _config(fields["config"])
    return Card(
        config=config,
        classes=_classes(fields["classes"], config.num_classes),
        preprocessing=_preprocessing(fields["preprocessing"]),
        metrics=fields["metrics"],
        recipe=fields["recipe"],
        versions=fields["versions"],
        initial_weights=fields["initial_weights"],
        sha256=weights["sha256"],
        bytes=weights["bytes"],
        buffer_dtypes=weights["buffer_dtypes"],
        file=INDEX if weights.get("file") == INDEX else WEIGHTS,  # a card names no other file
        backbone_sha256=fields["backbone_sha256"],
    )


def card_hash(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all fields but ``hash``, in JSON without spaces, ASCII only, keys sorted."""
    hashed = {name: value for name, value in fields.items() if name != "hash"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return digest(text)


def bundle_digest(card: Card) -> str:
    """Return a hash of everything in a bundle that its outputs depend on."""
    return digest(json.dumps([asdict(card.config), card.classes, card.preprocessing, card.sha256]))


def _check_format(fields: Mapping[str, Any]) -> None:
    if fields.get("format") != FORMAT:
        raise BundleError(
            f"{CARD} belongs to another program: its format is {shown(fields.get('format'))}, not 'covpool'"
        )
    version = fields.get("format_version")
    if type(version) is not int or version < 1:
        raise BundleError(f"{CARD} has no valid format_version; got {shown(version)}")
    if version > FORMAT_VERSION:
        raise BundleError(
            f"covpool {shown(fields.get('written_by'))} wrote it in bundle format {shown(version)}; this "
            f"covpool {__version__} reads up to format {FORMAT_VERSION}: pip install --upgrade covpool"
        )


def _check_types(where: str, values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for name, expected in types.items():
        if name not in values:
            raise BundleError(f"{where} has no field {name!r}")
        if not isinstance(values[name], expected):
            raise BundleError(f"{name!r} of {where} has a wrong type; got {shown(values[name])}")


def _check_pool_module(pool: object, module: object) -> None:
    """Raise if the pooling method is registered by a module that was not imported. It is never imported."""
    if module and not is_method(pool):
        raise BundleError(
            f"its pooling method {shown(pool)} is registered by the module {shown(module)}: import it before "
            "you load the bundle, if you trust it (for commands, a package lists it as an entry point of "
            "covpool.methods)"
        )


def _config(values: dict[str, Any]) -> ModelConfig:
    values = {"backbone_options": {}, "pool_options": {}, **values}
    _check_types("config", values, {"backbone": str, "backbone_options": dict, "pool_options": dict})
    if not re.fullmatch(PLAIN_NAME, values["backbone"]):
        raise BundleError(f"its backbone {shown(values['backbone'])} is not the plain name of a timm network")
    check_backbone_options(values["backbone_options"])
    for group in ("pool_options", "image_size"):
        _check_option(group, values.get(group))
    try:
        return ModelConfig.from_dict(values)
    except (AttributeError, TypeError, ValueError) as error:
        raise BundleError(f"its config is refused: {reason(error)}") from error


def check_backbone_options(options: Mapping[str, Any]) -> None:
    """Raise BundleError unless a stranger's options of ``timm.create_model`` only describe a network."""
    for option in options:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", option) or _READING.fullmatch(option):
            raise BundleError(f"its backbone_options have {shown(option)}, which a bundle must not set")
    _check_option("backbone_options", options)


def _check_option(name: str, value: object) -> None:
    """Raise unless ``value`` is a name, a number of ordinary size, or a list or dict of these."""
    if isinstance(value, list | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in NO_SIZES or not isinstance(item, int | float):
                _check_option(name, item)
    elif isinstance(value, str):
        if not re.fullmatch(r"[A-Za-z0-9_.+-]*", value):
            raise BundleError(f"{name} has {shown(value)}, which is not a name")
    elif value is not None and not (isinstance(value, int | float) and abs(value) <= MAX_OPTION):
        raise BundleError(f"{name} has {shown(value)}, but the largest value allowed is {MAX_OPTION}")


def _classes(names: list[Any] | None, number: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if len(names) != number or not all(isinstance(name, str) for name in names):
        raise BundleError(f"it must name {shown(number)} classes; got {len(names)}: {shown(names)}")
    return tuple(names)


def _preprocessing(values: dict[str, Any]) -> dict[str, Any]:
    """Return the six fields of timm, with tuples for lists."""
    kinds = {"input_size": list, "interpolation": str, "mean": list, "std": list, "crop_mode": str}
    _check_types("preprocessing", values, kinds | {"crop_pct": (int, float)})
    _check_option("preprocessing", values)
    size, crop = values["input_size"], values["crop_pct"]
    if len(size) != 3 or not all(type(side) is int and side > 0 for side in size) or size[0] > MAX_CHANNELS:
        raise BundleError(f"its input_size {shown(size)} is not channels, height and width")
    if not 0 < crop <= 1 or max(size[1:]) / crop > MAX_SIDE:
        raise BundleError(
            f"it resizes images to {shown(size[1:])} pixels over a crop_pct of {shown(crop)}, but crop_pct "
            f"must be in (0, 1] and the quotient at most {MAX_SIDE}"
        )
    for name, lowest in (("mean", -MAX_MEAN), ("std", MIN_STD)):
        numbers = values[name]
        if not all(isinstance(number, int | float) and lowest <= number <= MAX_MEAN for number in numbers):
            raise BundleError(f"its {name} {shown(numbers)} has values outside {lowest:g} to {MAX_MEAN:g}")
    return {name: tuple(v) if isinstance(v := values[name], list) else v for name in _PREPROCESSING}
