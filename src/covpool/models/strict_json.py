"""Read JSON strictly: no duplicate keys, no special numbers, bounded depth."""

from __future__ import annotations

import json
import math
import re
import reprlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import torch

from covpool import __version__
from covpool.errors import BundleError, UsageError, UsageTypeError


def plain_json(name: str, value: object) -> Any:
    """``value`` as JSON has it: lists for tuples, names for dtypes, ``None`` for NaN and infinities.

    A wrong type is the caller's mistake and raises. A NaN comes on a bad day, at the end of a long training,
    and must not cost the model.
    """
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, str):
        if re.search("[\ud800-\udfff]", value):  # how Python marks a file's name in another encoding
            raise UsageError(f"{name} is {value!r}, which is no text")
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [plain_json(f"{name}[{place}]", item) for place, item in enumerate(value)]
    if not isinstance(value, Mapping):
        hint = ": pass its .tolist()" if hasattr(value, "tolist") else ""
        raise UsageTypeError(
            f"{name} must be numbers, strings, lists and dicts; got {type(value).__name__}{hint}"
        )
    for key in value:
        if not isinstance(key, str):
            raise UsageTypeError(f"{name} must have strings as keys; got {key!r}")
    return {key: plain_json(f"{name}[{key!r}]", item) for key, item in value.items()}


def check_types(
    where: str, values: Mapping[str, Any], hints: Mapping[str, Any], required: Iterable[str]
) -> None:
    """Raise unless ``values`` has all ``required`` fields, only those of ``hints``, each of its type."""
    if unknown := sorted(values.keys() - hints.keys()):
        raise BundleError(
            f"{where} has a field {shown(unknown[0])}, which this covpool {__version__} does not know"
        )
    for name in required:
        if name not in values:
            raise BundleError(f"{where} has no field {name!r}")
    for name, value in values.items():
        if not _fits(value, hints[name]):
            wanted = str(getattr(hints[name], "__name__", "") if type(hints[name]) is type else hints[name])
            raise BundleError(f"{name!r} of {where} is {shown(value)}, not {wanted.replace('typing.', '')}")


def shown(value: object) -> str:
    """A stranger's value for a message: short, and without characters that a terminal obeys."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def reason(error: BaseException) -> str:
    """The first line of an error's message, with the same precautions."""
    return printable(next(iter(str(error).splitlines()), "") or type(error).__name__)


def printable(text: str) -> str:
    """At most 300 characters, those that a terminal might obey as question marks."""
    return "".join(character if character.isprintable() else "?" for character in text[:300])


def parse(data: bytes, name: str, max_bytes: int) -> dict[str, Any]:
    """The object in a file's content; of two fields of one name none would be the right one."""
    if len(data) > max_bytes:
        raise BundleError(f"{name} is larger than {max_bytes // 2**20} MiB")
    try:
        fields = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_float=_finite,
            parse_constant=_finite,
        )
        # Half of a surrogate pair passes through JSON, and breaks what prints it.
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise BundleError(f"{name} is cut short or not JSON: {reason(error)}") from error
    if not isinstance(fields, dict):
        raise BundleError(f"{name} is not a covpool card but {shown(fields)}")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict; of two fields of one name, different readers would see different ones."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise UsageError("a name comes twice in one object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UsageError(f"{text[:20]} is no number of JSON")
    return value


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of JSON is of a type, with lists for tuples and whole numbers for floats."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in inner)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)
