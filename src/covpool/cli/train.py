"""``covpool train``, and the options of verbs that take a recipe: its keys, the common ones by a short name.

See :func:`covpool.training.run.train_recipe` and :func:`covpool.training.run.compare`.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from covpool.arguments import DEVICES
from covpool.cli.main import Command
from covpool.cli.parser import Help, Parser, add_shared, add_trust, check_paths, underscored
from covpool.errors import Interrupted, UsageError
from covpool.nn.pooling import METHODS
from covpool.terminal import counted
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import (
    DEFAULT,
    PRETRAINED,
    SHORT,
    flat,
    options,
    read_recipe,
    recipe_names,
    recipe_text,
    sections,
)

if TYPE_CHECKING:
    from covpool.training.run import Run

EXAMPLE = "covpool train birds --model lcnet_050 --image-size 64 --epochs 3"
SUMMARY = """Train a network on images, and write a run folder with bundle and report.

covpool reads the recipe first, then the command line; --print-config prints the result.
Rerun the command to resume after an interruption.
On several GPUs or machines: torchrun --nproc-per-node 8 -m covpool train ..."""

# The keys in ``--help``; ``--help-all`` lists all.
_COMMON = """
    data.path model.backbone model.pool model.dim model.image_size weights.pretrained weights.path
    weights.bundle schedule.epochs optimizer.lr batch_size data.balance data.limit data.val_fraction
    data.workers loop.precision loop.device loop.deterministic seed out
"""
COMMON = _COMMON.split()
# Options that are no keys of a recipe.
TRAIN_OPTIONS: dict[str, dict[str, Any]] = {
    "compare": {"type": str, "help": "also train with this pooling, and report on both: gap, or another"},
    "print_config": {"action": "store_true", "help": "print the complete recipe, and exit"},
}

# Help of keys whose description in their section is not clear without it.
ALONE = {
    "data.limit": "largest number of images of each split, for a trial",
    "model.pool": f"pooling method: {', '.join(METHODS)}; gap trains the average-pooling baseline",
    "weights.pretrained": "start from pretrained weights: of an installed package, or downloaded by timm",
    "weights.bundle": "start from the network in this folder, of a run or of covpool convert",
    "weights.freeze": "backbone: train pooling and classifier only",
    "schedule.epochs": "number of training epochs",
    "optimizer.weight_decay": "weight decay",
    "loop.precision": "autocast precision: float32, bfloat16 or float16",
    "loop.device": f"{', '.join(DEVICES[:-1])} or {DEVICES[-1]}",
    "checkpoint.steps": "steps between checkpoints, in addition to those at the end of each epoch",
    "checkpoint.minutes": "minutes between checkpoints, in addition to those at the end of each epoch",
}


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``covpool train``.

    Attributes:
        recipe: the recipe, with the changes of the command line.
        compare: another pooling to train too.
        print_config: print the recipe, and exit.
    """

    recipe: Recipe
    compare: str | None = None
    print_config: bool = False


@dataclass(frozen=True)
class Trained:
    """A run, or with ``runs`` a comparison of several."""

    folder: str
    report: str
    was_finished: bool = False
    summary: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Trained] = field(default_factory=dict)


@dataclass(frozen=True)
class Interruption:
    """A run that a signal stopped."""

    sentence: str
    exit_code: int


@dataclass(frozen=True)
class Configuration:
    """A recipe, as YAML."""

    recipe: str


def parse(words: Sequence[str]) -> tuple[Arguments, bool]:
    """Read the recipe and apply the changes of the command line."""
    values = parse_words(words, make_parser(example=EXAMPLE))
    names = ("recipe", "compare", "print_config", "json", "quiet", "debug", "trust_rows")
    flags = {name: values.pop(name, None) for name in names}
    recipe = read_recipe(flags["recipe"], values)
    return Arguments(recipe, flags["compare"], bool(flags["print_config"])), bool(flags["json"])


def run(arguments: Arguments) -> Trained | Interruption | Configuration:
    """Train, or return the recipe."""
    recipe = arguments.recipe
    if arguments.print_config:
        return Configuration(recipe_text(recipe).rstrip())
    check_data(recipe)
    from covpool.training.run import compare, train_recipe

    try:
        if arguments.compare is None:
            return _trained(train_recipe(recipe))
        both = compare(recipe, arguments.compare)
        runs = {pool: _trained(run) for pool, run in both.runs.items()}
        return Trained(str(both.folder), str(both.report or ""), runs=runs)
    except Interrupted as interruption:
        return Interruption(str(interruption), interruption.exit_code)


def text(result: Trained | Interruption | Configuration) -> str:
    """Return the metrics, and the path of the report."""
    if isinstance(result, Configuration):
        return result.recipe
    if isinstance(result, Interruption):
        return result.sentence
    lines = [f"{pool}: {_result(run)}" for pool, run in result.runs.items()] or [_result(result)]
    return "\n".join([*lines, f"report: {result.report}"])


def exit_code(result: Trained | Interruption | Configuration) -> int:
    """Return that of the signal after an interruption, else 0."""
    return result.exit_code if isinstance(result, Interruption) else 0


def _trained(run: Run) -> Trained:
    return Trained(str(run.folder), str(run.folder / "report.html"), run.was_finished, run.summary)


def _result(run: Trained) -> str:
    before = "finished before: " if run.was_finished else ""
    epochs = f"after {counted(run.summary['epochs'], 'epoch')}"
    metrics = run.summary["metrics"]
    if not metrics:
        return f"{before}trained, {epochs}; there were no images to test on"
    shares = f"top-1 {metrics['top1']:.1%}, macro-F1 {metrics['macro_f1']:.1%}"
    return (
        f"{before}{shares} on the {counted(metrics['images'], 'image')} of {run.summary['split']}, {epochs}"
    )


def check_data(recipe: Recipe) -> None:
    """Raise if the recipe names no images."""
    if not recipe.data.path:
        raise UsageError("the data is missing: a folder of images, a CSV of path,label, or shards")


def parse_words(words: Sequence[str], parser: Parser) -> dict[str, Any]:
    """Return the values of a command line by key, without defaults."""
    if words and not words[0].startswith("-"):
        words = ["--data", *words]
    spelled = [_by_key(underscored(word)) for word in words]
    given = parser.parse_words(_nulled(spelled, parser.hints), defaults=False)
    check_paths(parser.prog, {"out": given.get("out")})
    return {key: value for key, value in given.items() if not isinstance(value, argparse.Namespace)}


def make_parser(
    command: str = "covpool train",
    summary: str = SUMMARY,
    more: Mapping[str, Mapping[str, Any]] = TRAIN_OPTIONS,
    example: str = "",
) -> Parser:
    """Return a parser with the common options first."""
    parser = _Parser(
        prog=command,
        usage=f"{command} DATA [--recipe NAME] [--model NAME] [options]",
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
        help="a recipe of the list below, or a YAML file (default: modern; with pretrained weights finetune)",
    )
    for key in COMMON:
        _add(common, parser, key)
    for name, how in more.items():
        common.add_argument(f"--{name}", **how)
    add_shared(common)
    by_key = {key: short for short, key in SHORT.items()}
    others = parser.add_argument_group("more options")
    for key in [*by_key, *(key for key in options() if "." not in key)]:
        if key not in COMMON:
            _add(others, parser, key)
    add_trust(others)
    for section in sections():
        group = parser.add_argument_group(f"more options of {section}")
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
        help=_plain(ALONE.get(key, option.meaning)).removesuffix(".") + _default(key),
    )


@functools.cache
def _defaults() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the two recipes that are used if none is named."""
    return flat(read_recipe(DEFAULT)), flat(read_recipe(PRETRAINED))


def _default(key: str) -> str:
    """Return the default of a key: of ``modern``, and of ``finetune`` where it differs."""
    values = [defaults[key] for defaults in _defaults()]
    first, second = (str(value).lower() if value in (None, True, False) else value for value in values)
    if first == second:
        return "" if first in ("none", "", {}, ()) else f" (default: {first})"
    return f" (default: {first}; with pretrained weights {second})"


class _Parser(Parser):
    """Use short names of options, also in errors."""

    def sentence(self, message: str) -> str:
        """Return what is wrong, with short names."""
        return _short(super().sentence(message))

    def options(self) -> list[str]:
        """Return all options, and the short names."""
        return [*super().options(), *(f"--{short.replace('_', '-')}" for short in SHORT)]


class _Help(Help, argparse.RawDescriptionHelpFormatter):
    """Print short names, and each recipe on a line."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return _short(super()._format_action_invocation(action))


def _metavar(key: str, hint: Any) -> str:
    if hint is bool:
        return "true|false"
    return "|".join(get_args(hint)) if get_origin(hint) is Literal else key.rpartition(".")[2].upper()


def _short(text: str) -> str:
    """Replace options by their short names, with hyphens."""
    by_key = {key.replace("_", "-"): short.replace("_", "-") for short, key in SHORT.items()}
    return re.sub(r"(?<=--)[\w.-]+", lambda key: by_key.get(key[0].replace("_", "-"), key[0]), text)


def _plain(meaning: str) -> str:
    """Return a description without the markup of docstrings."""
    meaning = re.sub(r":\w+:`~?([^`]+)`", r"\1", meaning)
    return re.sub(r"``(?:\"(\w+)\"|(.+?))``", r"\1\2", meaning).replace("None", "null")


def _by_key(word: str) -> str:
    """Return ``--epochs=3`` as ``--schedule.epochs=3``."""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    return f"--{SHORT.get(name[2:], name[2:])}{equals}{value}"


def _nulled(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """Return ``--dim none`` as ``--dim null``, where null is possible."""
    nullable = {f"--{key}" for key, hint in hints.items() if NoneType in get_args(hint)}
    replaced = []
    for before, word in pairwise(["", *words]):
        name, _, value = word.partition("=")
        if name in nullable and value == "none":
            word = f"{name}=null"
        replaced.append("null" if before in nullable and word == "none" else word)
    return replaced


train = Command(Arguments, EXAMPLE, run, text, parse=parse, exit_code=exit_code)
