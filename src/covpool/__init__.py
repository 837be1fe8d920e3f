"""Global covariance pooling with a fast matrix square root (iSQRT-COV), for any image backbone.

Importing covpool imports nothing else, so that ``covpool --help`` does not wait for torch. Its packages load
when they are first used. ``covpool.nn`` and ``covpool.functional`` need torch only; the others need an extra,
and their error names it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covpool import (
        closed_form,
        data,
        evaluate,
        explain,
        export,
        functional,
        inference,
        models,
        nn,
        sklearn,
        training,
    )
    from covpool.closed_form.fitting import fit
    from covpool.closed_form.kept import forget, merge, update
    from covpool.models.bundle import load_model
    from covpool.models.create import create_model
    from covpool.models.push import push_to_hub
    from covpool.models.saving import save_model
    from covpool.nn.cov_pool import CovPool
    from covpool.nn.pooling import register_method
    from covpool.training.run import train

# The release that a checkout leads to; the commit is in every result. pyproject.toml, CITATION.cff and
# CHANGELOG.md have the number too, and a test compares them.
CHECKOUT_VERSION = "0.1.0.dev0"


def version_in(folder: Path) -> str:
    """Return the version of the package in a folder, even if another covpool is installed.

    The metadata of a wheel is next to the package. An editable install has none there.
    """
    for installed in metadata.distributions(name="covpool", path=[str(folder)]):
        return installed.version
    return CHECKOUT_VERSION


__version__ = version_in(Path(__file__).parents[1])

__all__ = [
    "CovPool",
    "__version__",
    "closed_form",
    "create_model",
    "data",
    "evaluate",
    "explain",
    "export",
    "fit",
    "forget",
    "functional",
    "inference",
    "load_model",
    "merge",
    "models",
    "nn",
    "push_to_hub",
    "register_method",
    "save_model",
    "sklearn",
    "train",
    "training",
    "update",
]

# The extra with the dependencies of each package.
_EXTRAS = {
    "closed_form": "eval",
    "data": "data",
    "evaluate": "eval",
    "explain": "train",
    "export": "export",
    "functional": "",
    "inference": "eval",
    "models": "models",
    "nn": "",
    "sklearn": "eval",
    "training": "train",
}
# The module of each name that is not a package itself.
_MODULES = {
    "CovPool": "nn.cov_pool",
    "create_model": "models.create",
    "fit": "closed_form.fitting",
    "forget": "closed_form.kept",
    "load_model": "models.bundle",
    "merge": "closed_form.kept",
    "push_to_hub": "models.push",
    "register_method": "nn.pooling",
    "save_model": "models.saving",
    "train": "training.run",
    "update": "closed_form.kept",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name, name)
    package = module.partition(".")[0]
    if package not in _EXTRAS:
        raise AttributeError(f"module 'covpool' has no attribute {name!r}{_elsewhere(name)}")
    return _load("covpool", name, f"covpool.{module}", _EXTRAS[package])


def _elsewhere(name: str) -> str:
    """Return where a function on tensors is, as the end of a sentence; without tensors, import nothing."""
    if "torch" in sys.modules:
        functional = importlib.import_module("covpool.functional")
        if name in getattr(functional, "__all__", ()):  # it may be half imported
            return f": use covpool.functional.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def lazily(package: str, extra: str, modules: dict[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its modules when they are first used.

    Args:
        package: its ``__name__``.
        extra: the extra with its dependencies, for the error where one is missing.
        modules: the names of each module, separated by spaces.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return _load(package, name, places[name], extra)

    return get


def _load(package: str, name: str, module: str, extra: str) -> Any:
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
