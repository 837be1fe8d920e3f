"""``covpool lr-find``: see :func:`covpool.training.lr_find.find_lr`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covpool.cli.main import Command
from covpool.cli.train import check_data, make_parser, parse_words
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe

EXAMPLE = "covpool lr-find birds --model lcnet_050 --image-size 64 --batch-size 8"
STEPS = 100
SUMMARY = """Suggest a learning rate, before training with it.

The learning rate rises from step to step, from 1e-6 to 10, until the loss diverges. covpool suggests the rate
at which the loss fell fastest. The options are those of covpool train; it ignores --lr and the schedule, and
saves no weights. --out gets the curve, as lr_find.png and lr_find.csv."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``covpool lr-find``.

    Attributes:
        recipe: the recipe, with the changes of the command line.
        steps: number of steps from the lowest rate to the highest.
    """

    recipe: Recipe
    steps: int = STEPS


@dataclass(frozen=True)
class Suggestion:
    """The suggested learning rate, if any, and the files of the curve."""

    option: str
    suggestion: float | None
    highest: float
    steps: int
    figure: str
    table: str


def parse(words: Sequence[str]) -> tuple[Arguments, bool]:
    """Parse the options of ``train``, and ``--steps``."""
    more = {
        "steps": {
            "type": int,
            "help": f"number of steps from the lowest rate to the highest (default: {STEPS})",
        }
    }
    values = parse_words(words, make_parser("covpool lr-find", SUMMARY, more, EXAMPLE))
    flags = {
        name: values.pop(name, None) for name in ("recipe", "steps", "json", "quiet", "debug", "trust_rows")
    }
    steps = STEPS if flags["steps"] is None else flags["steps"]
    return Arguments(read_recipe(flags["recipe"], values), steps), bool(flags["json"])


def run(arguments: Arguments) -> Suggestion:
    """Run the sweep."""
    recipe = arguments.recipe
    check_data(recipe)

    from covpool.training.lr_find import find_lr, is_of_head

    sweep = find_lr(recipe, arguments.steps)
    folder = Path(recipe.out)
    return Suggestion(
        option="--schedule.head-lr" if is_of_head(recipe) else "--lr",
        suggestion=sweep.suggestion,
        highest=float(sweep.rates[-1]),
        steps=len(sweep.rates),
        figure=str(folder / "lr_find.png"),
        table=str(folder / "lr_find.csv"),
    )


def text(result: Suggestion) -> str:
    """Return the suggestion, and the path of the curve."""
    if result.suggestion is None:
        advice = (
            f"no rate up to {result.highest:.2g} stands out: the loss fell by no more than its noise; "
            "a larger --batch-size or more --steps may show one"
        )
    else:
        advice = (
            f"{result.option} {result.suggestion:.2g}: there the loss fell fastest, of all up to "
            f"{result.highest:.2g}"
        )
    return f"{advice}\ncurve: {result.figure}"


lr_find = Command(Arguments, EXAMPLE, run, text, parse=parse)
