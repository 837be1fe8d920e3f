"""The command line of what takes a recipe: every key of it, the common ones by a short name too."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from covpool.cli.parser import Help, Parser, add_shared, underscored, valued
from covpool.errors import UsageError
from covpool.nn.pooling import METHODS
from covpool.train.recipe import Recipe
from covpool.train.recipe_files import SHORT, options, recipe_names, sections

SUMMARY = """Train a network on images, and leave a folder that explains itself.

A recipe is read first, then what the command line says, in any order; --print-config shows what comes out.
The same command goes on where a run was interrupted.
On several GPUs or machines: torchrun --nproc-per-node 8 -m covpool train ..."""

# What is no key of a recipe.
TRAIN_OPTIONS: dict[str, dict[str, Any]] = {
    "compare": {"type": str, "help": "train with this pooling too, and report on both: gap, or another"},
    "print_config": {"action": "store_true", "help": "print the whole recipe, and do nothing"},
}

# What a section's own words leave open where they stand alone.
ALONE = {
    "data.limit": "for a trial: so many images of each split at most",
    "model.pool": f"the pooling: {', '.join(METHODS)}; gap trains the first-order twin",
    "weights.pretrained": "begin with timm's weights of the backbone, downloaded",
    "weights.bundle": "begin with the network in this folder, of a run or of covpool convert",
    "weights.freeze": "backbone: train pooling and classifier alone",
    "schedule.epochs": "how often every image is seen",
    "optimizer.weight_decay": "the weight decay",
    "loop.precision": "of autocast: float32, bfloat16 or float16",
    "loop.device": "auto, cpu or cuda",
    "checkpoint.steps": "a checkpoint every so many steps, beside those at the end of each epoch",
    "checkpoint.minutes": "a checkpoint after so many minutes, likewise",
}


def check_data(recipe: Recipe) -> None:
    """Raise unless the recipe says which images."""
    if not recipe.data.path:
        raise UsageError("--data is missing: a folder of images, a CSV of path,label, or shards")


def parse_words(words: Sequence[str], parser: Parser) -> dict[str, Any]:
    """What a command line says, by key; what it does not say is not there."""
    spelled = [_by_key(underscored(word)) for word in words]
    given = parser.parse_args(_nulled(valued(spelled, parser.hints), parser.hints), defaults=False)
    return {key: value for key, value in given.items() if not isinstance(value, argparse.Namespace)}


def make_parser(
    command: str = "covpool train",
    summary: str = SUMMARY,
    more: Mapping[str, Mapping[str, Any]] = TRAIN_OPTIONS,
    example: str = "",
) -> Parser:
    """A parser with the common options first.

    Args:
        command: the verb.
        summary: what it does.
        more: its options that are no keys of a recipe, as ``add_argument`` takes them.
        example: a command line that works.
    """
    parser = _Parser(
        prog=command,
        usage=f"{command} --data DIR [--recipe NAME] [--model NAME] [options]",
        description=summary,
        epilog="recipes:\n" + "\n".join(f"  {name}: {text}" for name, text in recipe_names().items()),
        formatter_class=_Help,
        allow_abbrev=False,
        print_config=None,  # jsonargparse has such an option itself, for parsers with files of their own
    )
    parser.example = example
    parser.hints = {"recipe": str} | {name: how["type"] for name, how in more.items() if "type" in how}
    common = parser.add_argument_group("common options")
    common.add_argument(
        "--recipe",
        type=str,
        help="one of those below, or a YAML file (default: modern; with pretrained weights finetune)",
    )
    by_key = {key: short for short, key in SHORT.items()}
    own = [key for key in options() if "." not in key]
    for key in [*by_key, *own]:
        _add(common, parser, key)
    for name, how in more.items():
        common.add_argument(f"--{name}", **how)
    add_shared(common)
    for section in sections():
        group = parser.add_argument_group(f"more of {section}")
        for key in options():
            if key.startswith(f"{section}.") and key not in by_key:
                _add(group, parser, key)
    return parser


def _add(group: Any, parser: Parser, key: str) -> None:
    option = options()[key]
    parser.hints[key] = option.hint
    group.add_argument(
        f"--{key}",
        type=option.hint,
        default=argparse.SUPPRESS,
        metavar=_metavar(key, option.hint),
        help=_plain(ALONE.get(key, option.meaning)),
    )


class _Parser(Parser):
    """Short names where there are, in what is wrong too."""

    def sentence(self, message: str) -> str:
        """As ever, with short names."""
        return _short(super().sentence(message))

    def options(self) -> list[str]:
        """All of them, and the short names."""
        return [*super().options(), *(f"--{short.replace('_', '-')}" for short in SHORT)]


class _Help(Help, argparse.RawDescriptionHelpFormatter):
    """Short names where there are, and the recipes on a line each."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return _short(super()._format_action_invocation(action))


def _metavar(key: str, hint: Any) -> str:
    if hint is bool:
        return "true|false"
    return "|".join(get_args(hint)) if get_origin(hint) is Literal else key.rpartition(".")[2].upper()


def _short(text: str) -> str:
    """With the short names of options, spelled by hyphens, for the long ones."""
    by_key = {key.replace("_", "-"): short.replace("_", "-") for short, key in SHORT.items()}
    return re.sub(r"(?<=--)[\w.-]+", lambda key: by_key.get(key[0].replace("_", "-"), key[0]), text)


def _plain(meaning: str) -> str:
    """Of a docstring, for a terminal."""
    meaning = re.sub(r":\w+:`~?([^`]+)`", r"\1", meaning)
    return re.sub(r"``(?:\"(\w+)\"|(.+?))``", r"\1\2", meaning).replace("None", "null")


def _by_key(word: str) -> str:
    """``--epochs=3`` as ``--schedule.epochs=3``."""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    return f"--{SHORT.get(name[2:], name[2:])}{equals}{value}"


def _nulled(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """``--dim none`` as ``--dim null``, where null is possible."""
    nullable = {f"--{key}" for key, hint in hints.items() if NoneType in get_args(hint)}
    made = []
    for before, word in pairwise(["", *words]):
        name, _, value = word.partition("=")
        if name in nullable and value == "none":
            word = f"{name}=null"
        made.append("null" if before in nullable and word == "none" else word)
    return made
