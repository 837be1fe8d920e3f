"""Replace a file or a folder in a process that is killed (or fails) just before its n-th system call.

``python tests/storage/dying.py WHAT HOW N PATH TEXT``. It imports the storage package alone, without torch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from covpool.storage.files import replace_file, write_file
from covpool.storage.folders import read_folder, replace_folder

CALLS = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")


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


def replace(what: str, path: str, text: str) -> None:
    if what == "file":
        replace_file(path, text.encode())
        return
    with replace_folder(path) as new:
        for name in ("first", "second"):
            write_file(new / name, text.encode())


def read(what: str, path: str) -> str:
    """Return the text; raise an error if it is incomplete."""
    return Path(path).read_text() if what == "file" else str(read_folder(path, read_both))


def read_both(folder: Path) -> str:
    first, second = ((folder / name).read_text() for name in ("first", "second"))
    if first != second:
        raise ValueError("the files do not belong together")
    return first


if __name__ == "__main__":
    what, how, number, path, text = sys.argv[1:]
    left = arrange_death(how, int(number))
    replace(what, path, text)
    print("unharmed" if left[0] > 0 else "it went on")
