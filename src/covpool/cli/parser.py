"""Command lines from dataclasses: jsonargparse, with options spelled by hyphens and errors in a sentence."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, DefaultHelpFormatter

Arguments = TypeVar("Arguments")

IN_WORDS = {
    bool: "true or false",
    dict: 'names and values, as {"a": 1}',
    float: "a number",
    int: "a whole number",
    Path: "a path",
    str: "a word",
    tuple: "a list, as [1,2]",
}


def parse(command: str, arguments: type[Arguments], argv: Sequence[str]) -> tuple[Arguments, bool]:
    """The dataclass ``arguments`` from a command line, and whether JSON was asked for.

    Raises:
        ValueError: with a sentence on what is wrong.
    """
    parser = make_parser(command, arguments)
    parsed = parser.parse_args(_valued([_underscored(word) for word in argv], parser.hints)).as_dict()
    as_json, _ = parsed.pop("json"), parsed.pop("debug")
    return arguments(**parsed), as_json


def make_parser(command: str, arguments: type[Any]) -> _Parser:
    """A parser with an option for every field, and those that all verbs share."""
    summary = (inspect.getdoc(arguments) or "").partition("\n\nAttributes:")[0]
    parser = _Parser(prog=command, description=summary, formatter_class=_Help, allow_abbrev=False)
    parser.hints = get_type_hints(arguments)
    parser.add_class_arguments(arguments, as_group=False, as_positional=True)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


class _Parser(ArgumentParser):
    """Hyphens in what is printed, and an exception in place of an exit."""

    hints: dict[str, Any]

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """As ever, with hyphens."""
        return _hyphenated(super().format_help(*args, **kwargs))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise."""
        raise ValueError(_hyphenated(self._sentence(message))) from ex

    def _sentence(self, message: str) -> str:
        """What is wrong, without the Python types that jsonargparse tells of over several lines."""
        key = re.search(r'key "(\w+)"', message)
        if key is None or key[1] not in self.hints:
            return message
        given = re.search(r"(?:Got|Given) value: (.*)", message)
        got = f"; got {given[1]}" if given else ""
        return f"--{key[1]} takes {_in_words(self.hints[key[1]])}{got}"


class _Help(DefaultHelpFormatter):
    """Descriptions and defaults, without the Python types."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").replace("``", "").removesuffix(".")
        is_told = isinstance(action.default, str | int | float) and not isinstance(action.default, bool)
        return f"{text} (default: %(default)s)" if is_told and action.default != argparse.SUPPRESS else text


def _in_words(hint: Any) -> str:
    """``int | Literal["auto", "none"] | None`` as "a whole number, auto or none"."""
    *others, last = _kinds(hint)
    return f"{', '.join(others)} or {last}" if others else last


def _kinds(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [word for kind in get_args(hint) if kind is not NoneType for word in _kinds(kind)]
    return [IN_WORDS.get(get_origin(hint) or hint, "something else")]


def _underscored(word: str) -> str:
    """``--batch-size=8`` as ``--batch_size=8``: options are named as the fields are."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word


def _valued(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """``--index`` as ``--index=true`` where it takes true or false and neither follows."""
    flags = {f"--{name}" for name, hint in hints.items() if hint is bool}
    return [
        f"{word}=true" if word in flags and following not in ("true", "false") else word
        for word, following in pairwise([*words, ""])
    ]


def _hyphenated(text: str) -> str:
    return re.sub(r"--\w+", lambda option: option[0].replace("_", "-"), text)
