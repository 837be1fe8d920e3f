r"""Docstrings on the API pages: an extension of griffe, and a hook of mkdocs.

The extension rewrites the markup of Sphinx as Markdown. Roles such as :func:`name` become code.
:math:`\Sigma` and blocks of mathematics become MathML, which browsers render. Defaults that are names of
constants, such as ``DIM``, become their values.

The hook writes a table of the names at the top of each API page, with the first sentence of each docstring,
and turns mathematics in any page into MathML.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`~?([^`]+)`")
INLINE = re.compile(r":math:`([^`]+)`")
BLOCK = re.compile(r"^\.\. math::\n\n?((?:(?:[ \t]+.*)?\n)+)", flags=re.MULTILINE)
FENCE = re.compile(r"^( *)```math\n(.+?)^ *```$", flags=re.DOTALL | re.MULTILINE)
CONSTANT = re.compile(r"\b[A-Z][A-Z_]+\b")
DOLLARS = re.compile(r"\$`([^`\n]+)`\$")
MARK = "<!-- overview -->"
NAME = re.compile(r"^::: (covpool\.[\w.]+)$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn mathematics in the notation of GitHub into MathML, and the mark into the table of names."""
    markdown = FENCE.sub(lambda match: match[1] + _mathml(match[2], "block"), markdown)
    markdown = DOLLARS.sub(lambda match: _mathml(match[1], "inline"), markdown)
    if MARK not in markdown:
        return markdown
    top = markdown.partition("\n## ")[0]  # methods follow, each with a heading
    rows = [f"| [`{name.rpartition('.')[2]}`](#{name}) | {_summary(name)} |" for name in NAME.findall(top)]
    return markdown.replace(MARK, "\n".join(["| name | purpose |", "|---|---|", *rows]))


def _summary(name: str) -> str:
    text = inspect.getdoc(pkgutil.resolve_name(name)) or ""
    return as_markdown(" ".join(text.partition("\n\n")[0].split())).replace("|", r"\|")


class Roles(griffe.Extension):
    """An extension that rewrites every docstring after it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Show the values of defaults that are constants."""
        for parameter in func.parameters:
            parameter.default = _constant(parameter.default, func)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Show the values of the fields of a dataclass that are constants."""
        attr.value = _constant(attr.value, attr)


def _constant(default: Any, owner: griffe.Object) -> Any:
    """Return the value of a default with names of constants, if it is a number, a word or a tuple of them."""
    if default is None or not CONSTANT.search(str(default)):
        return default
    try:
        value = eval(str(default), vars(importlib.import_module(owner.module.path)))
    except NameError:  # a word that is not a constant, in quotation marks
        return default
    parts = value if isinstance(value, tuple) else (value,)
    return repr(value) if all(isinstance(part, int | float | str) for part in parts) else default


def as_markdown(text: str) -> str:
    r"""Return a docstring as Markdown, without roles.

    Example:
        >>> as_markdown("see :func:`covpool.nn.methods`")
        'see `covpool.nn.methods`'
    """
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # griffe recognizes only the plural
    text = BLOCK.sub(lambda match: f"\n{_mathml(textwrap.dedent(match[1]), 'block')}\n\n", text + "\n")
    # Without the span, a line that begins with <math> would become a separate block.
    text = INLINE.sub(lambda match: f"<span>{_mathml(match[1], 'inline')}</span>", text)
    return ROLE.sub(r"`\1`", text).rstrip("\n")


def _mathml(latex: str, display: str) -> str:
    made = str(convert(" ".join(latex.split()), display=display))
    # A wide equation scrolls inside its box.
    return f'<div class="equation">{made}</div>' if display == "block" else made
