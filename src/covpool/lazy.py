"""Import the public names of a package when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, extra: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        extra: the extra with its dependencies, for the error where one is missing.
        names: the public names of each module. A name that is the module's own stands for the module.
    """
    modules = {name: module for module, listed in names.items() for name in listed}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(modules[name])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("covpool", "torch"):
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}: pip install 'covpool[{extra}]'", name=error.name
            ) from error
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return get
