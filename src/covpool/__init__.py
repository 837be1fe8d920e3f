"""Global covariance pooling with a fast matrix square root (iSQRT-COV), for any image backbone.

Importing covpool imports nothing else, so that ``covpool --help`` does not wait for torch. Its packages load
when they are first used. ``covpool.nn`` and ``covpool.functional`` need torch only; the others need an extra,
and their error names it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covpool import data, evaluate, explain, export, functional, inference, models, nn, sklearn, train
    from covpool.models.bundle import load_model
    from covpool.models.create import create_model
    from covpool.models.push import push_to_hub
    from covpool.models.saving import save_model
    from covpool.nn.cov_pool import CovPool
    from covpool.nn.pooling import register_method

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
    "create_model",
    "data",
    "evaluate",
    "explain",
    "export",
    "functional",
    "inference",
    "load_model",
    "models",
    "nn",
    "push_to_hub",
    "register_method",
    "save_model",
    "sklearn",
    "train",
]

# The extra with the dependencies of each package.
_EXTRAS = {
    "data": "data",
    "evaluate": "eval",
    "explain": "train",
    "export": "export",
    "functional": "",
    "inference": "eval",
    "models": "models",
    "nn": "",
    "sklearn": "eval",
    "train": "train",
}
# The package of each name that is not a package itself.
_PACKAGE_OF = {
    "CovPool": "nn",
    "create_model": "models",
    "load_model": "models",
    "push_to_hub": "models",
    "register_method": "nn",
    "save_model": "models",
}


def __getattr__(name: str) -> Any:
    package = _PACKAGE_OF.get(name, name)
    if package not in _EXTRAS:
        raise AttributeError(f"module 'covpool' has no attribute {name!r}")
    return _load("covpool", name, f"covpool.{package}", _EXTRAS[package])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
        return _load(package, name, modules[name], extra)

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


def _imports(file: str) -> dict[str, str]:
    """Return the module of each name that the type checker imports."""
    blocks = [node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
