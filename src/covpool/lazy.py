"""Import the public names of a package when they are first used."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazily(package: str, extra: str, file: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose imports are all under ``if TYPE_CHECKING``.

    Args:
        package: its ``__name__``.
        extra: the extra with its dependencies, for the error where one is missing.
        file: its ``__file__``, from which the imports are read.
    """
    modules: dict[str, str] = {}

    def get(name: str) -> Any:
        if not modules and not name.startswith("__"):
            modules.update(_imports(file))
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return load(package, name, modules[name], extra)

    return get


def load(package: str, name: str, module: str, extra: str) -> Any:
    """Return a name of a package from a module, or the module if it has this name."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("covpool", "torch"):
            raise
        raise ModuleNotFoundError(
            f"{package}.{name} needs {missing}: pip install 'covpool[{extra}]'", name=missing
        ) from error
    return loaded if module == f"{package}.{name}" else getattr(loaded, name)


def _imports(file: str) -> dict[str, str]:
    """Return the module of each name that the type checker imports."""
    blocks = [node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
