"""GeM, AbMILP, SimPool, the attentive probe and Efficient Probing against plain loops in numpy."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from covpool.functional.attention import attention
from covpool.nn.pooling import METHODS
from tests.nn.pooling.inputs import SPECTRA, C
from tests.nn.pooling.oracle import Array

State = dict[str, Array]


def softmax(scores: list[float], weights: Array) -> list[float]:
    total = sum(w * exp(s) for s, w in zip(scores, weights, strict=True))
    return [w * exp(s) / total for s, w in zip(scores, weights, strict=True)]


def loop_gem(state: State, image: Array, weights: Array, **_: Any) -> list[float]:
    p = state["p"].item()
    total = weights.sum()
    return [
        sum(w / total * max(x, 0.0) ** p for x, w in zip(channel, weights, strict=True)) ** (1 / p)
        for channel in image
    ]


def loop_abmilp(state: State, image: Array, weights: Array, gated: bool = False, **_: Any) -> Array:
    scores = []
    for x in image.T:
        units = np.tanh(state["hidden.weight"] @ x)
        if gated:
            units = units / (1 + np.exp(-state["gate.weight"] @ x))
        scores.append(float(state["score.weight"][0] @ units))
    return sum(a * x for a, x in zip(softmax(scores, weights), image.T, strict=True))


def loop_simpool(state: State, image: Array, weights: Array, gamma: float = 2.0) -> Array:
    mean = image @ weights / weights.sum()
    query = state["query.weight"] @ mean
    normalized = [(x - x.mean()) / np.sqrt(x.var() + 1e-6) for x in image.T]
    features = [state["norm.weight"] * z + state["norm.bias"] for z in normalized]
    scores = [float(query @ (state["key.weight"] @ z)) / sqrt(len(image)) for z in features]
    smallest = min(z.min() for z in features)
    values = [(z - smallest + 1e-6) ** gamma for z in features]
    pooled = sum(a * v for a, v in zip(softmax(scores, weights), values, strict=True))
    return pooled ** (1 / gamma)


def loop_attentive(state: State, image: Array, weights: Array, heads: int = 8) -> list[float]:
    """Project every position as in the equations, without fusing."""
    keys = [state["key.weight"] @ x for x in image.T]
    values = [state["value.weight"] @ x for x in image.T]
    each = -(-len(image) // heads)
    found: list[float] = []
    for first in range(0, len(image), each):
        of_head = slice(first, first + each)
        scores = [float(state["query"][of_head] @ key[of_head]) / sqrt(each) for key in keys]
        found += list(sum(a * v[of_head] for a, v in zip(softmax(scores, weights), values, strict=True)))
    return found


def loop_efficient_probing(
    state: State, image: Array, weights: Array, queries: int = 32, value: bool = True
) -> list[float]:
    values = [state["value.weight"] @ x if value else x for x in image.T]
    each = -(-len(image) // queries)
    found = []
    for channel in range(len(image)):
        query = state["query"][channel // each]
        attended = softmax([float(query @ x) / sqrt(len(image)) for x in image.T], weights)
        found.append(sum(a * v[channel] for a, v in zip(attended, values, strict=True)))
    return found


CASES: list[tuple[str, dict[str, Any], Callable[..., Any]]] = [
    ("gem", {}, loop_gem),
    ("gem", {"p": 1.5}, loop_gem),
    ("abmilp", {"hidden": 5}, loop_abmilp),
    ("abmilp", {"hidden": 5, "gated": True}, loop_abmilp),
    ("simpool", {}, loop_simpool),
    ("simpool", {"gamma": 1.25}, loop_simpool),
    ("attentive", {}, loop_attentive),  # one head per channel
    ("attentive", {"heads": 3}, loop_attentive),
    ("attentive", {"heads": 4}, loop_attentive),  # results in 3 heads of 2 channels
    ("efficient_probing", {}, loop_efficient_probing),
    ("efficient_probing", {"queries": 2}, loop_efficient_probing),
    ("efficient_probing", {"queries": 4, "value": False}, loop_efficient_probing),
]
every_case = pytest.mark.parametrize(
    ("name", "options", "loop"), CASES, ids=[f"{name} {options}" for name, options, _ in CASES]
)


def trained(name: str, options: dict[str, Any]) -> nn.Module:
    """Return a pooling whose parameters all have an effect, with attention far from uniform."""
    torch.manual_seed(3)
    pool = METHODS[name](C, **options).double()
    for parameter_name, parameter in pool.named_parameters():
        if parameter_name != "p":
            nn.init.normal_(parameter)
    return pool


@every_case
def test_is_the_equations(name: str, options: dict[str, Any], loop: Callable[..., Any]) -> None:
    pool = trained(name, options)
    state = {key: value.numpy() for key, value in pool.state_dict().items()}
    for kind, make in SPECTRA.items():
        x = make()
        n = x.shape[-1]
        random = torch.rand(2, n, dtype=torch.float64) + 0.01
        random[:, 1] = 0.0
        for weights in (None, random, random > 0.4):
            found = pool(x, weights).detach().numpy()
            each = torch.ones(2, n) if weights is None else weights
            for row, image, w in zip(found, x.numpy(), each.double().numpy(), strict=True):
                kept = w > 0
                expected = loop(state, image[:, kept], w[kept], **options)
                np.testing.assert_allclose(row, expected, rtol=1e-10, atol=1e-12, err_msg=kind)


@every_case
def test_gradients(name: str, options: dict[str, Any], loop: Callable[..., Any]) -> None:
    """Check the gradients of features, weights and all parameters against finite differences."""
    pool, x = trained(name, options), SPECTRA["full rank"](1, 7)
    names, parameters = zip(*pool.named_parameters(), strict=True)
    weights = torch.rand(1, 7, dtype=torch.float64).add(0.1).requires_grad_()

    def call(x: Tensor, weights: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(pool, state, (x, weights))

    assert torch.autograd.gradcheck(call, (x.requires_grad_(), weights, *parameters))


def test_attention_of_extreme_scores_and_weights() -> None:
    """Test huge scores, also at zero weights, and weights whose products underflow in float32."""
    scores = torch.tensor([[[1e12, -1e12, 3e12, 0.0]], [[0.0, 0.0, 0.0, 0.0]], [[5.0, 1.0, 9.0, 2.0]]])
    weights = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1e-30, 3e-30, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    leaves = scores.requires_grad_(), weights.requires_grad_()
    found = attention(*leaves)
    expected = [[[1.0, 0.0, 0.0, 0.0]], [[0.25, 0.75, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]]
    torch.testing.assert_close(found, torch.tensor(expected))
    grads = torch.autograd.grad(found, leaves, torch.randn_like(found))
    assert all(grad.isfinite().all() for grad in grads)


def test_a_small_weight_with_a_large_score_wins() -> None:
    """In float32, exp(200) is infinite and exp(-200) is zero, so w·exp(s) must not be computed directly."""
    found = attention(torch.tensor([[[200.0, 0.0]]]), torch.tensor([[1e-30, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[[1.0, 0.0]]]))
    found = attention(torch.tensor([[[-200.0, 0.0]]]), torch.tensor([[1.0, 1e-38]]))
    torch.testing.assert_close(found, torch.tensor([[[0.0, 1.0]]]))


def test_efficient_probing_starts_near_the_average() -> None:
    for name in ("efficient_probing", "attentive"):
        torch.manual_seed(0)
        pool, x = METHODS[name](64), torch.randn(2, 64, 49)
        expected = x.mean(-1) @ pool.value.weight.T
        torch.testing.assert_close(pool(x), expected, rtol=0.0, atol=2e-2)


def test_efficient_probing_with_the_batchnorm_of_the_paper() -> None:
    torch.manual_seed(0)
    plain, x = METHODS["efficient_probing"](64), torch.randn(8, 64, 49)
    normalized = METHODS["efficient_probing"](64, batchnorm=True)
    normalized.load_state_dict(plain.state_dict(), strict=False)
    y = plain(x)
    expected = (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-6).sqrt()
    torch.testing.assert_close(normalized(x), expected)
    torch.testing.assert_close(normalized.eval()(x[:1]), normalized(x)[:1])  # at inference, one image alone


def test_simpool_of_an_image_does_not_depend_on_the_batch() -> None:
    """The authors' code subtracts the smallest feature of the whole batch."""
    pool, x = trained("simpool", {}), torch.randn(3, C, 9, dtype=torch.float64)
    alone = pool(x[:1])
    x[1:] *= 50
    torch.testing.assert_close(pool(x)[:1], alone)


def test_gem_is_the_average_at_one_and_limits_its_exponent() -> None:
    x = torch.rand(2, C, 9)
    pool = METHODS["gem"](C, p=1.0)
    torch.testing.assert_close(pool(x), x.mean(-1))
    nn.init.constant_(pool.p, 300.0)
    torch.testing.assert_close(pool(x), METHODS["gem"](C, p=10.0)(x))
    pool(x).sum().backward()
    assert pool.p.grad.abs() > 0  # so it may return into its range


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gem", {"p": 0.5}, "^p must be from 1 to 10; got 0.5"),
        ("abmilp", {"hidden": 0}, "^hidden must be at least 1"),
        ("abmilp", {"gated": "yes"}, "^gated must be true or false; got 'yes'"),
        ("simpool", {"gamma": 0.0}, "^gamma must be"),
        ("attentive", {"heads": 0}, "^heads must be at least 1"),
        ("efficient_probing", {"queries": 0}, "^queries must be at least 1"),
        ("efficient_probing", {"value": 1}, "^value must be true or false; got 1"),
        ("efficient_probing", {"batchnorm": "no"}, "^batchnorm must be true or false; got 'no'"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        METHODS[name](C, **options)
