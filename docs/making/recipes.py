"""The table of recipes in docs/recipes.md, from the files: ``python -m docs.making.recipes`` writes it."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from covpool.train.recipe_files import recipe_names

PAGE = Path(__file__).parents[1] / "recipes.md"
PART = re.compile(r"(<!-- recipes:begin -->\n).*?(<!-- recipes:end -->)", flags=re.DOTALL)
# The folder of images by a word of a recipe's name; all others are for images of one's own.
DATA = {
    "imagenet": "imagenet",
    "birds": "CUB_200_2011",
    "aircraft": "fgvc-aircraft-2013b",
    "cars": "stanford_cars",
}


def table() -> str:
    """A row for each: its name, its first line, and the command."""
    rows = ["| recipe | purpose and command |", "|---|---|"]
    for name in recipe_names():
        text = (resources.files("covpool") / "recipes" / f"{name}.yaml").read_text("utf-8")
        what = text.partition("\n")[0].removeprefix("# ").strip()
        weights = " --pretrained" if name == "finetune" else ""
        rows.append(f"| `{name}` | {what}<br>`covpool train {data_of(name)} --recipe {name}{weights}` |")
    return "\n".join(rows)


def data_of(name: str) -> str:
    """The folder that its images are usually in."""
    found = [folder for part, folder in DATA.items() if part in name.split("-")]
    return found[0] if found else "birds/"


def page(text: str) -> str:
    """The page with the table as it should be."""
    return PART.sub(lambda part: f"{part[1]}{table()}\n{part[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
