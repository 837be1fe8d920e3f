"""Which images of a collection are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint8]  # a row for each image


def same_images(content: Digests, samples: Digests, pixels: Callable[[int], bytes]) -> Digests:
    """A digest of each image that is equal where the pixels are.

    Files of equal bytes are equal images. Others can only be so if a few of their pixels are equal: of those,
    and there are not many, all pixels are compared.

    Args:
        content: digests of the files' bytes.
        samples: digests of a few pixels.
        pixels: gives the digest of all pixels of an image.
    """
    result = content.copy()
    for group in groups_of_equals(samples):
        files, first, which = np.unique(content[group], axis=0, return_index=True, return_inverse=True)
        if len(files) > 1:
            digests = [np.frombuffer(pixels(int(i)), dtype=np.uint8) for i in group[first]]
            result[group] = np.stack(digests)[which.reshape(-1)]
    return result


def groups_of_equals(digests: Digests) -> Iterator[NDArray[np.int64]]:
    """The places of equal rows, where there are several, each group in order."""
    if not len(digests):
        return
    words = np.ascontiguousarray(digests).view(np.uint64)
    order = np.lexsort(words.T)
    is_new = np.any(words[order][1:] != words[order][:-1], axis=1)
    starts = np.concatenate([[0], np.flatnonzero(is_new) + 1, [len(order)]])
    for which in np.flatnonzero(np.diff(starts) > 1):
        # The sort is stable, so a group is in order as it is.
        yield order[starts[which] : starts[which + 1]]
