"""Pages and help texts avoid words that make readers stop. Add a word here when you find one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import DOCS, FENCED, README, name_of, needs_pages, read

pytestmark = needs_pages

AVOIDED = (
    "a mistake of ours",
    "amiss",
    "anew",
    "at hand",
    "be had",
    "Compared are",
    "first-order twin",
    "Found are",
    "goes on where",
    "is right",
    "its kin",
    "knows nothing",
    "likeliest",
    "of it is told",
    "of strangers",
    "percent right",
    "so is each",
    "speaks for",
    "Told is",
    "twin",
    "twins",
    "was begun",
)
PAGES = [README, *sorted(DOCS.glob("*.md"))]
WORDS = re.compile(rf"\b(?:{'|'.join(map(re.escape, AVOIDED))})\b", re.IGNORECASE)


def avoided_words(text: str) -> list[str]:
    """Return the avoided words outside of code, in order."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    return WORDS.findall(" ".join(prose.split()))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_avoid_words_that_make_readers_stop(page: Path) -> None:
    assert avoided_words(read(page)) == []


def test_words_are_found_across_lines_and_not_in_code() -> None:
    assert avoided_words("It goes on\nwhere it was, anew.") == ["goes on where", "anew"]
    assert avoided_words("`anew` and a renewed\n```\ntwin\n```\n") == []
