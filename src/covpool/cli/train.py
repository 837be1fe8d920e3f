"""``covpool train``: see :func:`covpool.train.fitting.fit` and :func:`covpool.train.comparison.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covpool.train.fitting import Run
    from covpool.train.recipe import Recipe

EXAMPLE = "covpool train --data birds --model lcnet_050 --image-size 64 --epochs 3"


@dataclass(frozen=True)
class Arguments:
    """What a command line asks for.

    Attributes:
        recipe: with all that was changed in it.
        compare: another pooling to train too.
        print_config: show the recipe, and do nothing.
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
    """A run that was told to stop."""

    sentence: str
    exit_code: int


@dataclass(frozen=True)
class Configuration:
    """A recipe, as YAML."""

    recipe: str


def parse(words: Sequence[str]) -> tuple[Arguments, bool]:
    """A recipe and what the command line changes in it, in any order."""
    from covpool.cli.train_options import make_parser, parse_words
    from covpool.train.recipe_files import read_recipe

    values = parse_words(words, make_parser(example=EXAMPLE))
    own = {name: values.pop(name, None) for name in ("recipe", "compare", "print_config", "json", "debug")}
    recipe = read_recipe(own["recipe"], values)
    return Arguments(recipe, own["compare"], bool(own["print_config"])), bool(own["json"])


def run(arguments: Arguments) -> Trained | Interruption | Configuration:
    """Train, or show what would be done."""
    from covpool.cli.train_options import check_data
    from covpool.train.recipe_files import recipe_text

    recipe = arguments.recipe
    if arguments.print_config:
        return Configuration(recipe_text(recipe).rstrip())
    check_data(recipe)

    from covpool.errors import Interrupted

    try:
        return _train(recipe) if arguments.compare is None else _compare(recipe, arguments.compare)
    except Interrupted as interruption:
        return Interruption(str(interruption), interruption.exit_code)


def text(result: Trained | Interruption | Configuration) -> str:
    """What came out, and where it is."""
    if isinstance(result, Configuration):
        return result.recipe
    if isinstance(result, Interruption):
        return result.sentence
    lines = [f"{pool}: {_result(run)}" for pool, run in result.runs.items()] or [_result(result)]
    return "\n".join([*lines, f"report: {result.report}"])


def exit_code(result: Trained | Interruption | Configuration) -> int:
    """That of the signal, after an interruption."""
    return result.exit_code if isinstance(result, Interruption) else 0


def _train(recipe: Recipe) -> Trained:
    from covpool.train.fitting import fit

    return _trained(fit(recipe))


def _compare(recipe: Recipe, other: str) -> Trained:
    from covpool.train.comparison import compare

    made = compare(recipe, other)
    runs = {pool: _trained(run) for pool, run in made.runs.items()}
    return Trained(str(made.folder), str(made.report or ""), runs=runs)


def _trained(run: Run) -> Trained:
    return Trained(str(run.folder), str(run.folder / "report.html"), run.was_finished, run.summary)


def _result(run: Trained) -> str:
    from covpool.wording import counted

    before = "finished before: " if run.was_finished else ""
    epochs = f"after {counted(run.summary['epochs'], 'epoch')}"
    metrics = run.summary["metrics"]
    if not metrics:
        return f"{before}trained, {epochs}; there were no images to test on"
    shares = f"top-1 {metrics['top1']:.1%}, macro-F1 {metrics['macro_f1']:.1%}"
    return (
        f"{before}{shares} on the {counted(metrics['images'], 'image')} of {run.summary['split']}, {epochs}"
    )
