"""Write the table in docs/recipes.md from the recipe files: ``python -m lab figures recipes``."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from covpool.training.recipe_files import recipe_names
from lab.record import ROOT, with_block

PAGE = ROOT / "docs" / "recipes.md"
# Image folder by a word in the name of a recipe. All other recipes are for your own images.
DATA = {
    "imagenet": "imagenet",
    "birds": "CUB_200_2011",
    "aircraft": "fgvc-aircraft-2013b",
    "cars": "stanford_cars",
}


def table() -> str:
    """Return a table with the name, the first line and the command of every recipe."""
    rows = ["| recipe | purpose and command |", "|---|---|"]
    for name in recipe_names():
        text = (resources.files("covpool") / "recipes" / f"{name}.yaml").read_text("utf-8")
        what = text.partition("\n")[0].removeprefix("# ").strip()
        weights = " --pretrained" if name == "finetune" else ""
        rows.append(f"| `{name}` | {what}<br>`covpool train {data_of(name)} --recipe {name}{weights}` |")
    return "\n".join(rows)


def data_of(name: str) -> str:
    """Return the usual image folder of a recipe."""
    folders = [folder for part, folder in DATA.items() if part in name.split("-")]
    return folders[0] if folders else "birds/"


def page(text: str) -> str:
    """Return the page with a new table."""
    return with_block(text, "recipes", table())


def write_pages() -> list[Path]:
    """Write the table in docs/recipes.md."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    return [PAGE]
