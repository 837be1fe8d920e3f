"""A parser of options and recipe keys whose errors are one sentence. Importing it does not import torch."""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from covpool.errors import UsageError
from covpool.terminal import did_you_mean

IN_WORDS = {
    bool: "true or false",
    dict: 'names and values, as {"a": 1}',
    float: "a number",
    int: "a whole number",
    Path: "a path",
    str: "a word",
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
        hint = self.hints[key[1]]
        given = re.search(r"(?:Got|Given) value: (.*)", message)
        near = did_you_mean(given[1], _choices(hint)) if given and get_origin(hint) is not tuple else ""
        got = f"; got {given[1]}{near}" if given else ""
        return f"{self.spelled(key[1])} takes {in_words(hint)}{got}"

    def spelled(self, key: str) -> str:
        """Return an option as the caller writes it."""
        return key


def in_words(hint: Any) -> str:
    """Describe a type: ``int | Literal["auto", "none"] | None`` is "a whole number, auto or none"."""
    *others, last = _kinds(hint)
    return f"{', '.join(others)} or {last}" if others else last


def _choices(hint: Any) -> list[str]:
    """Return the words that an option accepts, if it accepts only some."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [word for kind in get_args(hint) for word in _choices(kind)]


def _kinds(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return _choices(hint)
    if get_origin(hint) is tuple:
        words = _choices(hint) or {str: ["a", "b"]}.get(get_args(hint)[0], ["1", "2"])
        return [f"a list, as [{','.join(words[:2])}]"]
    if get_origin(hint) in (Union, UnionType):
        return [word for kind in get_args(hint) if kind is not NoneType for word in _kinds(kind)]
    return [IN_WORDS.get(get_origin(hint) or hint, "something else")]
