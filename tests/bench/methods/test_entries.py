from __future__ import annotations

from collections import Counter

import pytest
import torch

from covpool.bench.methods import paper
from covpool.bench.methods.entries import REFERENCE, VARIANTS, Entry, chosen_entries
from covpool.bench.methods.steps import POOLS
from covpool.nn.pooling import METHODS


def test_every_method_is_in_the_suite() -> None:
    entries = chosen_entries()
    assert {entry.method for entry in entries} == set(METHODS)
    assert max(Counter(entry.label for entry in entries).values()) == 1
    for method, variants in VARIANTS.items():
        assert sum(entry.method == method for entry in entries) == len(variants)


def test_a_method_that_is_added_is_in_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "another", METHODS["gap"])
    assert Entry("another", {}) in chosen_entries()


def test_variants_are_of_methods_there_are() -> None:
    assert set(VARIANTS) <= set(METHODS)


def test_every_row_of_the_paper_has_one_of_ours() -> None:
    labels = [entry.label for entry in chosen_entries()]
    assert set(paper.LAYERS) <= set(labels)
    assert REFERENCE in labels
    assert set(POOLS) <= set(METHODS)


def test_methods_can_be_chosen_and_the_reference_stays() -> None:
    assert [entry.label for entry in chosen_entries(["gap"])] == [
        "gap",
        "isqrt_cov",
        "isqrt_cov steps=3",
        "isqrt_cov normalization=frobenius",
    ]
    with pytest.raises(ValueError, match="got 'magic'"):
        chosen_entries(["magic"])


def test_an_entry_is_the_layer_with_its_options() -> None:
    layer = Entry("isqrt_cov", {"steps": 3}).layer(6)
    x = torch.randn(2, 6, 9)
    assert torch.equal(layer(x), METHODS["isqrt_cov"](6, steps=3)(x))
    assert layer.training
