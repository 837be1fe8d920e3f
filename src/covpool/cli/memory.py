"""Freed memory stays with the process, since it takes long to get it again.

The C library of most Linux systems returns a freed block of more than 32 MB to the kernel at once, and the
activations of a batch are such blocks. Every one of them then begins with pages that the kernel has to find
and fill with zeros: of EfficientNet-Lite2 at 448 pixels that is a third of the time on a CPU, or more. What
is kept instead has gaps, and makes that process a quarter larger; it does not go on growing.
"""

from __future__ import annotations

import ctypes
import os

# Of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Ask the C library to keep what is freed, for this process and those that it forks.

    It is for the whole of a process, so only a program may ask for it, not a library.

    Returns:
        Whether it does: other C libraries have no such setting, and one that the user made is left alone.
    """
    if _is_set_by_user():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # of musl, macOS and Windows
        return False
    # Blocks of any size come from the heap, and its end is never returned.
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)
