"""The pages of the documentation, with their code and their commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
# The front page, every page of the site, and other pages that the site includes.
_AROUND = [README, ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
PAGES = [page for page in [*_AROUND, *sorted(DOCS.rglob("*.md"))] if page.exists()]

needs_pages = pytest.mark.skipif(not DOCS.is_dir(), reason="tests without the checkout around them")

FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", flags=re.DOTALL)
SHELL_ENDS = ("|", "&&", ";", ">", ">>", "&", "||")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def python_blocks(page: Path) -> list[tuple[str, str]]:
    """Return the package that each block needs (or an empty string) and its code."""
    return PYTHON.findall(read(page))


def languages(page: Path) -> set[str]:
    return {language for _, language, _ in FENCED.findall(read(page))}


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words after ``covpool`` of every command in a fenced or indented shell block."""
    text = read(page)
    shell = [block for _, language, block in FENCED.findall(text) if language in ("sh", "bash")]
    shell += re.findall(r"(?:^    .*\n)+", FENCED.sub("", text), flags=re.MULTILINE)
    for block in shell:
        for line in block.replace("\\\n", " ").splitlines():
            yield from _commands_of_line(line)


def named_commands(page: Path) -> list[list[str]]:
    """Return the words after ``covpool`` of commands in sentences, complete or partial."""
    found = re.findall(r"`covpool ([a-z][^`]*)`", " ".join(FENCED.sub("", read(page)).split()))
    return [[word for word in words.split() if word != "..."] for words in found]


def _commands_of_line(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe: an indented block may be prose or another language
        return
    for i, word in enumerate(words):
        if word == "covpool" and words[i - 1] not in ("install", "import", "from") and words[i + 1 :]:
            rest = words[i + 1 :]
            ends = [rest.index(end) for end in SHELL_ENDS if end in rest]
            yield rest[: min(ends, default=len(rest))]
