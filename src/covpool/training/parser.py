"""A parser of options and recipe keys whose errors are one sentence. Importing it does not import torch."""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from covpool.errors import UsageError

IN_WORDS = {
    bool: "true or false",
    dict: 'names and values, as {"a": 1}',
    float: "a number",
    int: "a whole number",
    Path: "a path",
    str: "a word",
    tuple: "a list, as [1,2]",
}


class SentenceParser(ArgumentParser):
    """Raise an exception instead of exiting, and describe types in words.

    Attributes:
        hints: the type of each option.
    """

    hints: dict[str, Any]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise."""
        raise UsageError(self.sentence(message)) from ex

    def sentence(self, message: str) -> str:
        """Return the error message without the Python types that jsonargparse prints over several lines."""
        key = re.search(r'key "([\w.]+)"', message)
        if key is None or key[1] not in self.hints:
            return message
        given = re.search(r"(?:Got|Given) value: (.*)", message)
        got = f"; got {given[1]}" if given else ""
        return f"{self.spelled(key[1])} takes {in_words(self.hints[key[1]])}{got}"

    def spelled(self, key: str) -> str:
        """Return an option as the caller writes it."""
        return key


def in_words(hint: Any) -> str:
    """Describe a type: ``int | Literal["auto", "none"] | None`` is "a whole number, auto or none"."""
    *others, last = _kinds(hint)
    return f"{', '.join(others)} or {last}" if others else last


def _kinds(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [word for kind in get_args(hint) if kind is not NoneType for word in _kinds(kind)]
    return [IN_WORDS.get(get_origin(hint) or hint, "something else")]
