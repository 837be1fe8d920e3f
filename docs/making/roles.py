r"""An extension of griffe: what docstrings write for Sphinx, as Markdown.

Roles such as :func:`name` become code, :math:`\Sigma` and blocks of it become MathML, which browsers draw by
themselves.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`~?([^`]+)`")
INLINE = re.compile(r":math:`([^`]+)`")
BLOCK = re.compile(r"^\.\. math::\n\n?((?:(?:[ \t]+.*)?\n)+)", flags=re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    r"""A docstring without roles.

    Example:
        >>> as_markdown("see :func:`covpool.nn.methods`")
        'see `covpool.nn.methods`'
    """
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # griffe knows the plural alone
    text = BLOCK.sub(lambda found: f"\n{_mathml(textwrap.dedent(found[1]), 'block')}\n\n", text + "\n")
    text = INLINE.sub(lambda found: _mathml(found[1], "inline"), text)
    return ROLE.sub(r"`\1`", text).rstrip("\n")


def _mathml(latex: str, display: str) -> str:
    return str(convert(" ".join(latex.split()), display=display))
