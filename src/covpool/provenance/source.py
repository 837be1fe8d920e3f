"""Which code was measured: the commit, a digest of the sources, and the versions beneath them."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from covpool import __version__

PACKAGE = Path(__file__).resolve().parents[1]


def describe_source(rooms: Sequence[str]) -> dict[str, Any]:
    """The commit, whether the package differs from it, and a digest of the rooms that a result depends on.

    The digest is what makes a resumed run safe: with uncommitted changes the commit stays the same while the
    code does not.
    """
    return {"commit": _commit(), "dirty": _dirty(), "digest": _digest(rooms)}


def describe_versions() -> dict[str, Any]:
    """Python, torch, covpool, the libraries behind torch's products, and its precision setting."""
    blas = [line.strip("- ").strip() for line in torch.__config__.show().splitlines() if "MKL" in line]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "covpool": __version__,
        "cuda": torch.version.cuda,
        "blas": [line for line in blas if not line.startswith("Build settings")],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _commit() -> str | None:
    return _git("rev-parse", "HEAD") or None


def _dirty() -> bool | None:
    changes = _git("status", "--porcelain", "--", str(PACKAGE))
    return None if changes is None else changes != ""


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _digest(rooms: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            digest.update(path.relative_to(PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
