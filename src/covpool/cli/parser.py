"""Command lines from dataclasses, by jsonargparse: options have hyphens, and errors are one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import glob
import inspect
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import DefaultHelpFormatter

from covpool.arguments import check_whole
from covpool.errors import UsageError
from covpool.terminal import announce_loading, did_you_mean
from covpool.training.parser import SentenceParser, in_words


def parse_several(
    command: str,
    kinds: Sequence[type[Any]],
    argv: Sequence[str],
    example: str = "",
    skip: Collection[str] = (),
) -> tuple[list[Any], bool]:
    """Return several dataclasses from a command line, and whether to print JSON.

    Args:
        command: the name in the help.
        kinds: the dataclasses. The docstring of the first is the help; its fields without a default are
            positional.
        argv: the words of the command line.
        example: a command line that works, for the end of the help.
        skip: fields that are not options.

    Raises:
        UsageError: if an option is wrong.
    """
    parser = make_parser(command, *kinds, skip=skip)
    parser.example = example
    parsed = parser.parse_words([*map(underscored, argv)]).as_dict()
    as_json = parsed.pop("json")
    check_values(parsed)
    check_paths(command, parsed)
    announce_loading(command)
    for name in parser.lists:
        words = parsed[name].removeprefix("[").removesuffix("]").split(",")
        parsed[name] = tuple(word.strip() for word in words if word.strip())
    values = [kind(**{name: parsed[name] for name in _names(kind) if name in parsed}) for kind in kinds]
    if parsed.get("device", "auto") not in ("auto", "cpu"):
        from covpool.device import chosen_device  # here: it imports torch

        chosen_device(parsed["device"])
    return values, as_json


# Numbers that may be 0.
MAY_BE_ZERO = ("max_bad", "num_classes", "retries", "seed", "svm_seeds", "workers")


def check_values(parsed: Mapping[str, Any]) -> None:
    """Check numbers, before a command imports torch.

    Raises:
        UsageError: if a whole number is below the smallest one.
    """
    for name, value in parsed.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int) and not isinstance(number, bool):
                check_whole(_hyphenated(f"--{name}"), number, at_least=int(name not in MAY_BE_ZERO))


# Options that name a local file or folder, or a URL.
LOCATIONS = ("basis", "data", "first", "second", "weights")
# The commands whose --out is a file.
WRITE_A_FILE = ("covpool check",)
# One of these files is in the folder of a bundle or of a fit.
MODEL_FILES = ("covpool.json", "bundle/covpool.json")


def check_paths(command: str, parsed: Mapping[str, Any]) -> None:
    """Check the paths among the arguments of a command.

    Raises:
        UsageError: if --out is a file, or the model is not the first path.
        OSError: if a file or a folder does not exist.
    """
    if parsed.get("out") is not None and command not in WRITE_A_FILE:
        _check_folder(str(parsed["out"]))
    is_model_first = "bundle" in parsed or isinstance(parsed.get("model"), Path)
    if is_model_first and "data" in parsed:
        first = parsed.get("bundle") or parsed["model"]
        if _is_model(parsed["data"]) and not _is_model(first):
            raise UsageError(
                f"{parsed['data']} is a model: pass the model first, as in {command} {parsed['data']} {first}"
            )
    paths = {name: str(parsed[name]) for name in LOCATIONS if parsed.get(name) is not None}
    if isinstance(parsed.get("model"), Path):
        paths["model"] = str(parsed["model"])
    for name, path in paths.items():
        if "://" not in path and not glob.has_magic(path):
            os.stat(path)
        if name == "weights" and os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _check_folder(out: str) -> None:
    for path in () if "://" in out else (Path(out), *Path(out).parents):
        if path.is_file():
            raise UsageError(f"--out must be a folder, and {path} is a file: use another --out")


def _is_model(path: str | Path) -> bool:
    return any(Path(path, name).is_file() for name in MODEL_FILES)


def make_parser(command: str, *kinds: type[Any], skip: Collection[str] = ()) -> Parser:
    """Return a parser with an option for every field, and the options of all verbs."""
    summary = (inspect.getdoc(kinds[0]) or "").partition("\n\nAttributes:")[0]
    parser = Parser(prog=command, description=summary, formatter_class=Help, allow_abbrev=False)
    parser.hints, parser.lists = {}, []
    for kind in kinds:
        hints = get_type_hints(kind)
        lists = [name for name in _names(kind) if hints[name] in (Sequence[str], tuple[str, ...])]
        parser.hints |= hints | dict.fromkeys(lists, str)
        parser.lists += lists
        parser.add_class_arguments(kind, as_group=False, as_positional=True, skip={*lists, *skip})
        for name in lists:
            _add_list(parser, kind, name)
    add_shared(parser)
    if "data" in parser.hints:
        add_trust(parser)
    return parser


def _add_list(parser: Parser, kind: type[Any], name: str) -> None:
    """Add an option of several words, separated by commas."""
    meanings = {
        meaning.arg_name: meaning.description for meaning in docstring_parser.parse(kind.__doc__ or "").params
    }
    default = ",".join(getattr(kind, name))
    parser.add_argument(f"--{name}", type=str, default=default, help=meanings[name])


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def add_shared(parser: Any) -> None:
    """Add the options of every verb to a parser or a group of one."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")


def add_trust(parser: Any) -> None:
    """Add the option of every verb that reads images to a parser or a group of one."""
    what = "rows of a table may name files outside its folder, and servers on private networks"
    parser.add_argument("--trust_rows", action="store_true", help=what)


class Parser(SentenceParser):
    """Print options with hyphens, and raise an exception instead of exiting.

    Attributes:
        example: a command line that works, for the end of the help.
        lists: options whose values are separated by commas.
        words: the words of the command line.
    """

    example: str = ""
    lists: Collection[str] = ()
    words: Sequence[str] = ()

    def parse_words(self, words: Sequence[str], **kwargs: Any) -> Any:
        """Parse a command line; its options are spelled as the fields are."""
        self.words = valued(words, self.hints)
        return self.parse_args(self.words, **kwargs)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help, with hyphens and the example."""
        text = _hyphenated(super().format_help(*args, **kwargs))
        return f"{text}\nexample:\n  {self.example}\n" if self.example else text

    def sentence(self, message: str) -> str:
        """Return the error message with hyphens, and what to type instead."""
        sentence = _hyphenated(super().sentence(message))
        if "arguments are required" in sentence and self.example:
            return f"{sentence}; example: {self.example}"
        if bare := re.match(r"argument (--[\w.-]+): expected one argument", sentence):
            key = bare[1].removeprefix("--").replace("-", "_")
            kind = "values separated by commas" if key in self.lists else in_words(self.hints[key])
            return f"{bare[1]} needs a value: {kind}"
        unknown = re.match(r"unrecognized arguments: (--?[A-Za-z][\w.-]*)?", sentence)
        if unknown is None:
            return sentence
        hint = f"; {self.prog} --help lists the options"
        takes = [action.dest for action in self._actions if not action.option_strings] or ["data"]
        if unknown[1] is None:
            if joined := _joined(self.words, self.lists):
                return f"{sentence}: join values by commas, as in {joined}"
            return (
                f"{sentence}; {self.prog} accepts only {' and '.join(takes)}; "
                "quote spaces and patterns, as 'photos/*.jpg'"
            )
        if unknown[1].removeprefix("--") in takes:
            return f"{unknown[1]} is not an option: leave out this word; example: {self.example}"
        return sentence + (did_you_mean(unknown[1], self.options()) or hint)

    def options(self) -> list[str]:
        """Return all options, as they are printed."""
        return [_hyphenated(name) for action in self._actions for name in action.option_strings]

    def spelled(self, key: str) -> str:
        """Return a key as an option."""
        return f"--{key}"


class Help(DefaultHelpFormatter):
    """Print descriptions and defaults, without Python types."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").replace("``", "").removesuffix(".")
        default = action.default
        is_told = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
        return (
            f"{text} (default: %(default)s)" if is_told and default not in ("", argparse.SUPPRESS) else text
        )


def _joined(words: Sequence[str], lists: Collection[str]) -> str:
    """Return ``--heads gap isqrt_cov`` with a comma; nothing if no list is written like this."""
    for place, word in enumerate(words):
        values = itertools.takewhile(lambda value: not value.startswith("-"), words[place + 1 :])
        if word.removeprefix("--") in lists and len(joined := list(values)) > 1:
            return f"{_hyphenated(word)} {','.join(joined)}"
    return ""


# Words that follow an option of true or false as its value; those but true and false are mistakes.
TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def underscored(word: str) -> str:
    """Return ``--batch-size=8`` as ``--batch_size=8``, since options are named as the fields are."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word


def valued(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """Return ``--index`` as ``--index=true`` where it takes true or false and no such word follows."""
    flags = {f"--{name}" for name, hint in hints.items() if hint is bool}
    return [
        f"{word}=true" if word in flags and following.lower() not in TRUTHS else word
        for word, following in pairwise([*words, ""])
    ]


def _hyphenated(text: str) -> str:
    return re.sub(r"--[\w.]+", lambda option: option[0].replace("_", "-"), text)
