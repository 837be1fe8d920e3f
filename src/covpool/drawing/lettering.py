"""Names of classes and files in figures: whatever they hold, they are drawn, as text and on one line."""

from __future__ import annotations

from functools import cache
from typing import Any

from matplotlib import font_manager

# For scripts that the first, which comes with matplotlib, does not have; those that a machine has are used.
FAMILIES = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Noto Sans JP",
    "Noto Sans KR",
    "Noto Sans Devanagari",
    "Noto Sans Bengali",
    "Noto Sans Tamil",
    "Noto Sans Thai",
    "WenQuanYi Zen Hei",
    "Arial Unicode MS",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Nirmala UI",
    "Leelawadee UI",
)


def text_style() -> dict[str, Any]:
    """Options of a text that holds a name: a dollar sign in it is no formula."""
    return {"family": list(_families()), "parse_math": False, "usetex": False}


def drawn(name: str, instead: str, length: int) -> str:
    r"""A name as a figure can show it.

    Args:
        name: any text.
        instead: what is shown if no font of this machine has most of the name's characters.
        length: of more characters, those in the middle are left out, since names of classes often begin
            alike.

    Example:
        >>> drawn("Clay colored\nSparrow", "class 4", 12)
        'Clay c…arrow'
    """
    one_line = " ".join(name.split())
    shown = "".join(character if ord(character) in _characters() else "□" for character in one_line)
    if not shown or shown.count("□") * 2 > len(shown):
        return instead
    if len(shown) <= length:
        return shown
    end = (length - 1) // 2
    return f"{shown[: length - 1 - end]}…{shown[len(shown) - end :]}"


@cache
def _families() -> tuple[str, ...]:
    installed = set(font_manager.fontManager.get_font_names())
    return tuple(family for family in FAMILIES if family in installed)


@cache
def _characters() -> frozenset[int]:
    fonts = (font_manager.get_font(font_manager.findfont(family)) for family in _families())
    return frozenset(code for font in fonts for code in font.get_charmap() if chr(code).isprintable())
