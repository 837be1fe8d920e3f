"""Searches and scores against plain loops, scikit-learn and faiss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch import Tensor

from covpool.evaluate.search import BYTES, score, search_exact, search_faiss


def made(n: int, classes: int, seed: int) -> tuple[Tensor, Any]:
    """Return vectors that are loosely clustered by class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    centers = torch.randn(classes, 16, generator=torch.Generator().manual_seed(99))
    return F.normalize(centers[labels] + 1.5 * torch.randn(n, 16, generator=generator)), labels.numpy()


def by_hand(similarity: Any, is_match: Any) -> tuple[int, float, float]:
    """Return the first match, the average precision and the average precision at R, rank by rank."""
    order = sorted(range(len(similarity)), key=lambda place: (-similarity[place], place))
    total, hits, r, first, whole, at_r = int(is_match.sum()), 0, 0, 0, 0.0, 0.0
    for r, place in enumerate(order, start=1):
        if is_match[place]:
            hits += 1
            first = first or r
            whole += hits / r
            at_r += hits / r if r <= total else 0
    return first, whole / total, at_r / total


@pytest.mark.parametrize("memory", [1, 40 * 300, 1 << 28])
@pytest.mark.parametrize("same", [True, False])
def test_scores_are_those_of_plain_loops_and_scikit_learn(memory: int, same: bool) -> None:
    queries, labels = made(90, 6, seed=0)
    gallery, among = (queries, labels) if same else made(130, 6, seed=1)
    blocks = search_exact(queries, gallery, torch.arange(90) if same else None, memory)
    found = score(blocks, labels, among, nearest=4, without_itself=same)
    similarity = (queries @ gallery.T).double().numpy()
    assert found.precision is not None
    for query in range(90):
        others = np.arange(len(among)) != (query if same else -1)
        row, is_match = similarity[query, others], among[others] == labels[query]
        first, whole, at_r = by_hand(row, is_match)
        assert found.matches[query] == is_match.sum()
        assert found.first_match[query] == first
        assert found.precision[query] == pytest.approx(whole, abs=1e-12)
        assert found.precision[query] == pytest.approx(average_precision_score(is_match, row), abs=1e-6)
        assert found.precision_at_r[query] == pytest.approx(at_r, abs=1e-12)
        assert found.nearest[query].tolist() == np.flatnonzero(others)[np.argsort(-row)[:4]].tolist()
    for k in (1, 2, 8):
        assert found.recall(k) == np.mean(found.first_match <= k)
    assert 0.1 < found.recall(1) < 0.9


def test_blocks_keep_within_their_memory() -> None:
    queries, _ = made(100, 3, seed=0)
    blocks = list(search_exact(queries, queries, torch.arange(100), memory=BYTES * 100 * 7))
    assert [start for start, _ in blocks] == list(range(0, 100, 7))
    assert [len(order) for _, order in blocks] == [7] * 14 + [2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the wrapper of faiss
@pytest.mark.parametrize("same", [True, False])
def test_faiss_finds_what_the_exact_search_does(same: bool) -> None:
    pytest.importorskip("faiss")
    queries, labels = made(300, 12, seed=0)
    gallery, among = made(500, 12, seed=1)
    itself = None
    if same:  # the queries are somewhere in the gallery
        itself = torch.randperm(500, generator=torch.Generator().manual_seed(2))[:300]
        queries, labels = gallery[itself], among[itself.numpy()]
    exact = score(search_exact(queries, gallery, itself), labels, among, nearest=5, without_itself=same)
    most = int(exact.matches.max())
    found = search_faiss(queries, gallery, most, itself, memory=10_000)
    faiss = score(found, labels, among, nearest=5, without_itself=same)
    assert faiss.precision is None
    assert [faiss.recall(k) for k in (1, 2, 4, 8)] == [exact.recall(k) for k in (1, 2, 4, 8)]
    np.testing.assert_allclose(faiss.precision_at_r, exact.precision_at_r, atol=1e-12)
    assert (faiss.nearest == exact.nearest).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["exact", "faiss"])
def test_of_equal_images_the_first_comes_first(engine: str) -> None:
    """The query itself is never found, though others are as near."""
    if engine == "faiss":
        pytest.importorskip("faiss")
    queries = torch.eye(3)[[0, 1, 1, 1, 2]]
    itself = torch.arange(5)
    exact = engine == "exact"
    blocks = search_exact(queries, queries, itself) if exact else search_faiss(queries, queries, 4, itself)
    ((_, order),) = blocks
    assert order.tolist() == [[1, 2, 3, 4], [2, 3, 0, 4], [1, 3, 0, 4], [1, 2, 0, 4], [0, 1, 2, 3]]


def test_a_query_without_a_match_counts_for_nothing() -> None:
    queries, labels = made(20, 2, seed=0)
    labels[3] = 7
    blocks = search_exact(queries, queries, torch.arange(20))
    found = score(blocks, labels, labels, nearest=1, without_itself=True)
    assert found.counted.sum() == 19
    assert found.first_match[3] == 0
    assert np.isnan(found.precision_at_r[3])
    kept = np.arange(20) != 3
    assert found.recall(19) == 1.0
    assert np.isfinite(found.best_known_precision[kept]).all()


def test_a_class_that_the_gallery_lacks() -> None:
    queries, labels = made(5, 2, seed=0)
    gallery, among = made(9, 2, seed=1)
    labels[0] = 5
    assert score(search_exact(queries, gallery), labels, among, nearest=1).matches[0] == 0
