"""What went wrong, in a sentence that says what to do."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

# What a caller can get wrong, as the library says it.
MISTAKES = (ValueError, TypeError, OSError)

# What to do about an error of the disk.
REMEDIES = {
    errno.ENOSPC: "make room, and run the same command again",
    errno.EDQUOT: "make room, and run the same command again",
    errno.EROFS: "give another place",
    errno.EACCES: "change its permissions, or give another place",
    errno.EPERM: "change its permissions, or give another place",
    errno.ENOTDIR: "a file is where a folder should be; give another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or give fewer --workers",
}
# How torch says that a CPU has no memory left: by a RuntimeError with one of these.
NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def explained(error: Exception, extra: str) -> tuple[str, int]:
    """A sentence for an error, and the exit code: 2 for what the caller can change, 1 for a mistake of ours.

    The sentence is empty where another process tells it.

    Args:
        error: that ended a verb.
        extra: that brings what the verb needs.
    """
    # Two of covpool's own go by their names: to import them would take the seconds of torch.
    if type(error).__name__ == "ToldByFirstError":
        return "", 2
    if type(error).__name__ == "Interrupted":  # a run that a verb is made of was asked to stop
        return str(error), int(getattr(error, "exit_code", 1))
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("covpool"):
        return f"{error.name} is missing: pip install '{f'covpool[{extra}]' if extra else error.name}'", 2
    if _is_memory(error):
        where = "the GPU's memory" if "CUDA" in str(error) else "the memory of this machine"
        return f"{where} is not enough: smaller batches, where there are any, or smaller images need less", 2
    if isinstance(error, OSError) and error.strerror:
        return _of_the_disk(error), 2
    if isinstance(error, MISTAKES):
        return str(error), 2
    return f"{type(error).__name__}: {error} (--debug shows where)", 1


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The choice that looks most like ``word``, as the end of a sentence; nothing if none does.

    For verbs, options and paths; :mod:`covpool.functional.arguments` has one for values, but with torch.
    """
    bare = {choice.lstrip("-"): choice for choice in choices}  # two hyphens make any two options alike
    word = word.lstrip("-")
    near = [name for name in bare if name.startswith(f"{word}-")] or difflib.get_close_matches(
        word, bare, cutoff=0.7
    )
    return f": did you mean {bare[near[0]]}?" if near else ""


def _is_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in NO_MEMORY)


def _of_the_disk(error: OSError) -> str:
    told = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if error.errno == errno.ENOENT and isinstance(error.filename, str | os.PathLike):
        return told + _named_alike(Path(error.filename))
    remedy = REMEDIES.get(error.errno or 0)
    return f"{told}: {remedy}" if remedy else told


def _named_alike(path: Path) -> str:
    """A neighbour whose name is nearly that of a file that is not there."""
    try:
        return did_you_mean(path.name, [neighbour.name for neighbour in path.parent.iterdir()])
    except OSError:  # its folder is not there either
        return ""
