"""Random numbers by key: the generator is the published one, and the numbers of a key never change."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covpool.data.order import number, numbers, permutation, torch_seeded


def test_numpys_philox_is_the_published_one() -> None:
    # The first known answer of its authors (Random123, philox4x64-10), for counter and key zero. numpy
    # increments the counter before it draws, so the counter starts one lower.
    drawn = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)
    assert [int(value) for value in drawn] == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


# Changing one of these values would change the order of every resumed run.
def test_numbers_of_a_key_are_pinned() -> None:
    assert number("order", 0, 0) == 0x4C2F16B624B0BB93
    assert number("order", -3, 2**70, size=128) == 0xFD9A7A46CE39CBC816AE6D0094281CEE
    assert numbers(2, "order", 0, 0).tolist() == [16050212141976579065, 13805154761243842452]
    assert permutation(10, "order", 0, 0).tolist() == [6, 2, 7, 8, 4, 1, 5, 0, 3, 9]


@given(n=st.integers(0, 300), seed=st.integers(-(2**63), 2**64))
def test_a_permutation_has_every_number_once(n: int, seed: int) -> None:
    order = permutation(n, "order", seed)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


def test_every_place_is_equally_likely() -> None:
    places = np.array([permutation(5, "order", seed) for seed in range(4000)])
    counts = np.array([np.bincount(places[:, place], minlength=5) for place in range(5)])
    assert (abs(counts - 800) < 5 * (4000 * 0.2 * 0.8) ** 0.5).all()


def test_every_part_of_a_key_counts() -> None:
    keys = [("a", 1, 2), ("a", 12), ("a", 1), ("b", 1, 2), ("a", 2, 1), ("a", -1, 2), ("a", 1, 2, 0)]
    assert len({number(what, *key) for what, *key in keys}) == len(keys)
    assert number("a", np.int64(1), 2) == number("a", 1, 2)
    with pytest.raises(TypeError):
        number("a", 1.0)  # type: ignore[arg-type]


def test_torch_seeded_lends_the_generator() -> None:
    torch.manual_seed(5)
    torch.rand(3)
    before = torch.get_rng_state()
    with torch_seeded("augmentation", 0, 1):
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with contextlib.suppress(KeyError), torch_seeded("augmentation", 0, 2):
        second = torch.rand(4)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    with torch_seeded("augmentation", 0, 1):
        assert torch.equal(torch.rand(4), first)
    assert not torch.equal(first, second)
