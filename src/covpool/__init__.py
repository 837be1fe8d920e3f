"""Global covariance pooling with a fast matrix square root (iSQRT-COV), for any image backbone.

Importing covpool imports nothing else. The layer and its mathematics, ``covpool.nn`` and
``covpool.functional``, need torch and no more; every room is imported when it is first asked for, so that
``covpool --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covpool.version import version_in

if TYPE_CHECKING:
    from covpool import functional, nn
    from covpool.models.bundle import load_model, save_model
    from covpool.models.create import create_model

__version__ = version_in(Path(__file__).parents[1])

__all__ = ["__version__", "create_model", "functional", "load_model", "nn", "save_model"]

# Where the names live. What a room needs beyond torch is brought by the extra of its name.
_LAZY = {
    "create_model": "models",
    "functional": "functional",
    "load_model": "models",
    "models": "models",
    "nn": "nn",
    "save_model": "models",
    "train": "train",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'covpool' has no attribute {name!r}")
    extra = _LAZY[name]
    try:
        room = importlib.import_module(f"covpool.{extra}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("covpool", "torch"):
            raise
        raise ModuleNotFoundError(
            f"covpool.{name} needs {error.name}: pip install 'covpool[{extra}]'", name=error.name
        ) from error
    return room if name == extra else getattr(room, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
