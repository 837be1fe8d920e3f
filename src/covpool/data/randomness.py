"""Random numbers by key: the same key gives the same numbers, on every machine and whatever came before.

A key is a word and whole numbers, such as ``"order", seed, epoch``. BLAKE2 turns it into 128 bits, and those
are the key of Philox, a counter-based generator. Only Philox's raw output is used: numpy promises that stream
for good, while it may change how its ``Generator`` makes permutations and bounded numbers of it.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray


def number(what: str, *key: int, size: int = 64) -> int:
    """The random number of a key, of so many bits.

    Example:
        >>> number("order", 0, 7) == number("order", 0, 7) != number("order", 0, 8)
        True
    """
    text = ":".join([what, *(str(operator.index(part)) for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size // 8).digest(), "little")


def numbers(count: int, what: str, *key: int) -> NDArray[np.uint64]:
    """So many random numbers of 64 bits."""
    drawn: NDArray[np.uint64] = np.random.Philox(key=number(what, *key, size=128)).random_raw(count)
    return drawn


def permutation(n: int, what: str, *key: int) -> NDArray[np.int64]:
    """The numbers from 0 to n - 1 in random order: sorted by a random number for each."""
    # A stable sort, so that even two equal random numbers leave nothing open.
    return np.argsort(numbers(n, what, *key), kind="stable").astype(np.int64, copy=False)


@contextmanager
def torch_seeded(what: str, *key: int) -> Iterator[None]:
    """Inside, torch's generator on the CPU starts from the key; afterwards it is as it was before.

    ``torch.manual_seed`` would also seed the generators of the GPUs, and for good.
    """
    generator = torch.default_generator
    before = generator.get_state()
    try:
        generator.manual_seed(number(what, *key))
        yield
    finally:
        generator.set_state(before)
