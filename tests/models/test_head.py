"""Linear, low-rank and MLP heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from covpool.models.config import Head


def count(head: Head) -> int:
    return sum(parameter.numel() for parameter in head.parameters())


def test_linear() -> None:
    head, x = Head(10, 3), torch.randn(2, 10)
    torch.testing.assert_close(head(x), x @ head.classifier.weight.T + head.classifier.bias)
    assert torch.equal(head(x, pre_logits=True), x)
    assert head.hidden_size == 10
    assert count(head) == 10 * 3 + 3


def test_low_rank_is_one_linear_map() -> None:
    head, x = Head(10, 30, rank=2), torch.randn(4, 10)
    weight = head.classifier.weight @ head.hidden[0].weight
    assert torch.linalg.matrix_rank(weight) == 2
    torch.testing.assert_close(head(x), x @ weight.T + head.classifier.bias)
    assert head(x, pre_logits=True).shape == (4, 2)
    assert count(head) == 10 * 2 + 2 * 30 + 30


def test_hidden_layers() -> None:
    head, x = Head(10, 3, hidden=(8, 6), drop_rate=0.5), torch.randn(4, 10)
    first, second = head.hidden[0], head.hidden[3]
    expected = second(first(x).relu()).relu()
    torch.testing.assert_close(head.eval()(x, pre_logits=True), expected)
    torch.testing.assert_close(head(x), head.classifier(expected))
    assert [type(layer) for layer in head.hidden] == [nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU]
    assert count(head) == 10 * 8 + 8 + 8 * 6 + 6 + 6 * 3 + 3


def test_hidden_layers_with_batchnorm() -> None:
    head = Head(10, 3, hidden=(8, 6), batchnorm=True)
    kinds = [type(layer) for layer in head.hidden]
    assert kinds.count(nn.BatchNorm1d) == 2
    assert kinds[:3] == [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert all(layer.bias is None for layer in head.hidden if isinstance(layer, nn.Linear))


@pytest.mark.parametrize("options", [{}, {"hidden": (8,)}])
def test_dropout_in_training_alone(options: dict[str, tuple[int, ...]]) -> None:
    head = Head(1000, 3, drop_rate=0.5, **options)
    x = torch.ones(1, 1000)
    dropped = head.train()(x, pre_logits=True)
    kept = head.eval()(x, pre_logits=True)
    assert (dropped == 0).sum() > (kept == 0).sum()
    torch.testing.assert_close(dropped[dropped != 0], 2 * kept[dropped != 0])


@pytest.mark.parametrize("options", [{}, {"rank": 4}, {"hidden": (8,)}])
def test_normalized(options: dict[str, Any]) -> None:
    head, x = Head(10, 3, normalize="l2", **options).eval(), torch.randn(4, 10)
    received = head.hidden(x)
    expected = received / received.norm(dim=1, keepdim=True)
    torch.testing.assert_close(head(x, pre_logits=True), expected)
    torch.testing.assert_close(head(x), head.classifier(expected))


def test_zeros_stay_zeros_when_normalized() -> None:
    head = Head(10, 3, normalize="l2")
    logits = head(torch.zeros(1, 10))
    assert torch.equal(logits[0], head.classifier.bias)
    logits.sum().backward()
    assert head.classifier.weight.grad.isfinite().all()


def test_the_norm_of_half_precision_is_taken_in_float32() -> None:
    head = Head(10_000, 3, normalize="l2").half()
    x = torch.full((1, 10_000), 30.0)  # the sum of its squares exceeds the range of float16
    assert torch.equal(head(x, pre_logits=True), torch.full((1, 10_000), 0.01).half())
    assert not head(torch.zeros(1, 10_000)).isnan().any()
