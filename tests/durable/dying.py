"""Replace a file or a folder in a process that is killed (or fails) just before its n-th system call.

``python tests/durable/dying.py MODULE WHAT HOW N PATH TEXT``. It loads the module from its file, because
importing the package would import torch and take seconds.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CALLS = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("replacing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arrange_death(how: str, number: int) -> list[int]:
    """Kill or fail at the given system call; return a list with the number of calls left."""
    left = [number]

    def watched(call: Any) -> Any:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if left[0] == 0:
                raise {"fail": OSError, "interrupt": KeyboardInterrupt}[how]("arranged")
            return call(*arguments, **options)

        return wrapper

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))
    return left


def replace(replacing: ModuleType, what: str, path: str, text: str) -> None:
    if what == "file":
        replacing.replace_file(path, text.encode())
        return
    with replacing.replace_folder(path) as new:
        for name in ("first", "second"):
            replacing.write_file(new / name, text.encode())


def read(replacing: ModuleType, what: str, path: str) -> str:
    """Return the text; raise an error if it is incomplete."""
    return Path(path).read_text() if what == "file" else str(replacing.read_folder(path, read_both))


def read_both(folder: Path) -> str:
    first, second = ((folder / name).read_text() for name in ("first", "second"))
    if first != second:
        raise ValueError("the files do not belong together")
    return first


if __name__ == "__main__":
    file, what, how, number, path, text = sys.argv[1:]
    module = load(file)
    left = arrange_death(how, int(number))
    replace(module, what, path, text)
    print("unharmed" if left[0] > 0 else "it went on")
