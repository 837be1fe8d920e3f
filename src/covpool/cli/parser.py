"""Command lines from dataclasses: jsonargparse, with options spelled by hyphens and errors in a sentence."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

from jsonargparse import DefaultHelpFormatter

from covpool.cli.mistakes import did_you_mean
from covpool.train.recipe_files import SentenceParser

Arguments = TypeVar("Arguments")


def parse(
    command: str, arguments: type[Arguments], argv: Sequence[str], example: str = ""
) -> tuple[Arguments, bool]:
    """The dataclass ``arguments`` from a command line, and whether JSON was asked for.

    The help ends with the ``example``, a command line that works.

    Raises:
        ValueError: with a sentence on what is wrong.
    """
    parser = make_parser(command, arguments)
    parser.example = example
    parsed = parser.parse_args(valued([underscored(word) for word in argv], parser.hints)).as_dict()
    as_json, _ = parsed.pop("json"), parsed.pop("debug")
    return arguments(**parsed), as_json


def part_of(arguments: Any, kind: type[Arguments]) -> Arguments:
    """The dataclass ``kind`` from arguments that have all of its fields, beside others."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: getattr(arguments, field.name) for field in fields})


def make_parser(command: str, arguments: type[Any]) -> Parser:
    """A parser with an option for every field, and those that all verbs share."""
    summary = (inspect.getdoc(arguments) or "").partition("\n\nAttributes:")[0]
    parser = Parser(prog=command, description=summary, formatter_class=Help, allow_abbrev=False)
    parser.hints = get_type_hints(arguments)
    parser.add_class_arguments(arguments, as_group=False, as_positional=True)
    add_shared(parser)
    return parser


def add_shared(parser: Any) -> None:
    """The options of every verb, into a parser or a group of one."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


class Parser(SentenceParser):
    """Hyphens in what is printed, and an exception in place of an exit.

    Attributes:
        example: a command line that works, for the end of the help.
    """

    example: str = ""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """As ever, with hyphens, and with the example."""
        text = _hyphenated(super().format_help(*args, **kwargs))
        return f"{text}\nexample:\n  {self.example}\n" if self.example else text

    def sentence(self, message: str) -> str:
        """As ever, with hyphens, and for an option that there is not one that it looks like."""
        told = _hyphenated(super().sentence(message))
        unknown = re.match(r"unrecognized arguments: (--[\w.-]+)", told)
        return told + did_you_mean(unknown[1], self.options()) if unknown else told

    def options(self) -> list[str]:
        """All of them, as they are printed."""
        return [_hyphenated(name) for action in self._actions for name in action.option_strings]

    def spelled(self, key: str) -> str:
        """As an option."""
        return f"--{key}"


class Help(DefaultHelpFormatter):
    """Descriptions and defaults, without the Python types."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").replace("``", "").removesuffix(".")
        is_told = isinstance(action.default, str | int | float) and not isinstance(action.default, bool)
        return f"{text} (default: %(default)s)" if is_told and action.default != argparse.SUPPRESS else text


def underscored(word: str) -> str:
    """``--batch-size=8`` as ``--batch_size=8``: options are named as the fields are."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word


def valued(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """``--index`` as ``--index=true`` where it takes true or false and neither follows."""
    flags = {f"--{name}" for name, hint in hints.items() if hint is bool}
    return [
        f"{word}=true" if word in flags and following not in ("true", "false") else word
        for word, following in pairwise([*words, ""])
    ]


def _hyphenated(text: str) -> str:
    return re.sub(r"--[\w.]+", lambda option: option[0].replace("_", "-"), text)
