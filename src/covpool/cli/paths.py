"""Check the paths of a command line before any work, and find the path that a wrong one may mean."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covpool.errors import UsageError
from covpool.terminal import did_you_mean

# Options that name a local file or folder, or a URL.
LOCATIONS = ("basis", "data", "first", "second", "weights")
# The commands whose --out is a file.
WRITE_A_FILE = ("covpool check",)
# One of these files is in the folder of a bundle or of a fit.
MODEL_FILES = ("covpool.json", "bundle/covpool.json")


def check_paths(command: str, parsed: Mapping[str, Any]) -> None:
    """Check the paths among the arguments of a command.

    Raises:
        UsageError: if --out is a file, or the model is not the first path.
        OSError: if a file or a folder does not exist.
    """
    if parsed.get("out") is not None and command not in WRITE_A_FILE:
        _check_folder(str(parsed["out"]))
    is_model_first = "bundle" in parsed or isinstance(parsed.get("model"), Path)
    if is_model_first and "data" in parsed:
        first = parsed.get("bundle") or parsed["model"]
        if _is_model(parsed["data"]) and not _is_model(first):
            raise UsageError(
                f"{parsed['data']} is a model: pass the model first, as in {command} {parsed['data']} {first}"
            )
    paths = {name: str(parsed[name]) for name in LOCATIONS if parsed.get(name) is not None}
    if isinstance(parsed.get("model"), Path):
        paths["model"] = str(parsed["model"])
    for name, path in paths.items():
        if "://" not in path and not glob.has_magic(path):
            os.stat(path)
        if name == "weights" and os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _check_folder(out: str) -> None:
    for path in () if "://" in out else (Path(out), *Path(out).parents):
        if path.is_file():
            raise UsageError(f"--out must be a folder, and {path} is a file: use another --out")


def _is_model(path: str | Path) -> bool:
    return any(Path(path, name).is_file() for name in MODEL_FILES)


def named_alike(path: str) -> str:
    """Return what a path that does not exist may mean, as the end of a sentence; nothing if that is unclear.

    It is a URL with one slash, or a neighbor of the first part of the path that does not exist.
    """
    if url := re.fullmatch(r"(\w{2,}):/([^/].*)", path):
        return f": did you mean {url[1]}://{url[2]}?"
    missing = Path(path)
    try:
        while not missing.parent.exists():
            missing = missing.parent
        return did_you_mean(missing.name, [neighbor.name for neighbor in missing.parent.iterdir()])
    except OSError:
        return ""
