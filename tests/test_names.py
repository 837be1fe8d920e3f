"""Names in the source say what a thing is, not that it was made or found."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "covpool"
EMPTY = {"found", "made", "own", "told", "wanted"}
EXCEPTIONS = {"evaluate/svm/classifier.py: own"}  # a key of the results in model cards


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of variables, parameters, attributes, functions and classes that code defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            yield node.name or ""
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def empty_names(code: str) -> set[str]:
    """Return the names without a meaning that code defines."""
    return {name for name in defined_names(ast.parse(code)) if name.lower().strip("_") in EMPTY}


def test_names_say_what_a_thing_is() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    read = {file: empty_names(path.read_text("utf-8")) for file, path in files.items()}
    assert {f"{file}: {name}" for file, names in read.items() for name in names} == EXCEPTIONS


def test_every_kind_of_definition_is_read() -> None:
    for code in (
        "found = 1",
        "found, rows = f()",
        "for made in rows: pass",
        "[own for own in rows]",
        "def f(*, wanted): pass",
        "lambda told: 1",
        "self._found = 1",
        "class Told: pass",
        "def made(): pass",
        "try: pass\nexcept OSError as found: pass",
    ):
        assert empty_names(code), code
    assert not empty_names('"""found"""\nrows = found.own  # made\nf(own=1)')
