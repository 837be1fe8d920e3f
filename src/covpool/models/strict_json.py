"""Write plain JSON, read JSON from strangers, and quote their values in messages."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from covpool.errors import BundleError, UsageError, UsageTypeError


def plain_json(name: str, value: object) -> Any:
    """Return ``value`` as JSON has it: lists for tuples, names for dtypes, ``None`` for NaN and infinities.

    A wrong type is a mistake of the caller and raises. A NaN may appear at the end of a long training run,
    and must not cost the model.
    """
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, str):
        if re.search("[\ud800-\udfff]", value):  # Python's mark for a file name in another encoding
            raise UsageError(f"{name} is {value!r}, which is not valid text")
        return value
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
        fields = json.loads(data.decode("utf-8"))
        # Python's reader accepts NaN, infinities and half surrogate pairs; this writer does not.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name} is truncated or not JSON: {reason(error)}") from error
    if not isinstance(fields, dict):
        raise BundleError(f"{name} is not a JSON object but {shown(fields)}")
    return fields


def shown(value: object) -> str:
    """Return a stranger's value for a message: short, without characters that control a terminal."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, printable."""
    return printable(next(iter(str(error).splitlines()), "") or type(error).__name__)


def printable(text: str) -> str:
    """Return at most 300 characters, with question marks for those that control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:300])
