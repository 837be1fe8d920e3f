"""The divided classifier on 2, 3 and 4 gloo processes matches a dense classifier on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from covpool.errors import UsageError
from covpool.nn.divided import DividedLinear, class_share
from tests.nn.process_group import Group

WORLDS = (2, 3, 4)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """A batch and a classifier.

    Attributes:
        counts: number of images per process; repeated if there are more processes.
        classes: number of classes, K.
        features: number of features, D.
        dtype: dtype of the weights.
        smoothing: label smoothing.
        targets: number of classes per image: 2 for mixup.
        weighted: whether classes have weights.
        bias: whether there is a bias.
        labels: draw the labels from this number of first classes, ``None`` for all.
        scale: factor of the features.
        seed: seed of all random numbers.
    """

    counts: tuple[int, ...] = (3, 2, 4, 1)
    classes: int = 11
    features: int = 6
    dtype: torch.dtype = torch.float64
    smoothing: float = 0.1
    targets: int = 2
    weighted: bool = True
    bias: bool = True
    labels: int | None = None
    scale: float = 1.0
    seed: int = 0


class Data:
    """The tensors of a case, identical in every process."""

    def __init__(self, case: Case) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.counts = [case.counts[k % len(case.counts)] for k in range(world)]
        self.own = slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))
        generator = torch.Generator().manual_seed(case.seed)
        size = sum(self.counts)
        self.x = torch.randn(size, case.features, generator=generator, dtype=case.dtype) * case.scale
        high = case.labels or case.classes
        self.classes = torch.randint(high, (size, case.targets), generator=generator)
        shares = torch.rand(size, case.targets, generator=generator, dtype=torch.float64) + 0.1
        self.shares = (shares / shares.sum(1, keepdim=True)).to(case.dtype)
        weights = torch.rand(case.classes, generator=generator, dtype=case.dtype)
        self.weights = weights if case.weighted else torch.ones_like(weights)

    def dense_loss(self, logits: Tensor, smoothing: float) -> Tensor:
        """Return the loss as the recipes compute it, with a dense target."""
        targets = torch.zeros_like(logits).scatter_add_(1, self.classes, self.shares.to(logits.dtype))
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        return (losses * (targets @ self.weights)).sum() / max(len(losses), 1)

    def divided_loss(
        self, head: DividedLinear, x: Tensor, smoothing: float, averaged: bool = False
    ) -> Tensor:
        shares = self.shares[self.own]
        found = head.loss(x, self.classes[self.own], shares, label_smoothing=smoothing, averaged=averaged)
        weights = (self.weights[found.classes] * found.shares).sum(1)
        return (found.losses * weights).sum() / max(len(found.losses), 1)


def heads(case: Case) -> tuple[nn.Linear, DividedLinear]:
    """Return a dense and a divided classifier, initialized with the same seed."""
    torch.manual_seed(case.seed)
    dense = nn.Linear(case.features, case.classes, bias=case.bias, dtype=case.dtype)
    torch.manual_seed(case.seed)
    return dense, DividedLinear(case.features, case.classes, case.bias, dtype=case.dtype)


def largest(*pairs: tuple[Tensor, Tensor]) -> float:
    """Return the largest difference, relative to the largest entry if that is above 1."""
    found = [0.0]
    for mine, other in pairs:
        assert mine.shape == other.shape
        if mine.numel():
            found.append(float((mine - other).abs().max() / other.abs().max().clamp(min=1)))
    assert all(one == one for one in found), "NaN"
    return max(found)


def once(case: Case) -> float:
    """Check predictions of one step; return the largest difference in loss and gradients."""
    data = Data(case)
    dense, divided = heads(case)
    rows = slice(divided.rows.start, divided.rows.stop)
    assert torch.equal(divided.weight, dense.weight[rows])
    whole, own = data.x.clone().requires_grad_(), data.x[data.own].clone().requires_grad_()
    logits = dense(whole)
    expected = data.dense_loss(logits, case.smoothing)
    expected.backward()
    loss = data.divided_loss(divided, own, case.smoothing)
    loss.backward()
    found = divided.loss(own.detach(), data.classes[data.own])
    assert torch.equal(found.predicted, logits.argmax(1)), "predictions"
    assert torch.equal(found.classes, data.classes)
    pairs = [
        (loss, expected),
        (own.grad, whole.grad[data.own]),
        (divided.weight.grad, dense.weight.grad[rows]),
    ]
    if case.bias:
        pairs.append((divided.bias.grad, dense.bias.grad[rows]))
    return largest(*pairs)


def steps(case: Case, name: str) -> float:
    """Train ten steps with a layer under DDP and the divided classifier outside; compare with one process."""
    data = Data(case)
    dense, divided = heads(case)
    rows = slice(divided.rows.start, divided.rows.stop)
    trunks = []
    for _ in range(2):
        torch.manual_seed(case.seed + 1)
        layer = nn.Linear(case.features, case.features, dtype=case.dtype)
        trunks.append(nn.Sequential(layer, nn.Tanh()))
    parallel = DistributedDataParallel(trunks[1])
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}[name]
    one = make([*trunks[0].parameters(), *dense.parameters()])
    many = make([*parallel.parameters(), *divided.parameters()])
    for _ in range(10):
        data.dense_loss(dense(trunks[0](data.x)), case.smoothing).backward()
        data.divided_loss(divided, parallel(data.x[data.own]), case.smoothing, averaged=True).backward()
        for optimizer in (one, many):
            optimizer.step()
            optimizer.zero_grad()
    pairs = list(zip(trunks[1].parameters(), trunks[0].parameters(), strict=True))
    moved = heads(case)[0].weight[rows]
    assert largest((divided.weight, moved)) > 1e-3, "the weights did not move"
    return largest(*pairs, (divided.weight, dense.weight[rows]))


def scores(case: Case, top: int) -> float:
    """Compare top-k predictions and the ranks of the labels with those of all logits."""
    data = Data(case)
    dense, divided = heads(case)
    labels = data.classes[:, 0]
    logits = dense(data.x).detach()
    if case.scale == 0:  # equal logits everywhere
        assert (logits == logits[0, 0]).all()
    mine = divided.score(data.x[data.own], labels[data.own], top)
    logits, labels = logits[data.own], labels[data.own]
    own = logits.gather(1, labels[:, None])
    first = (logits == own) & (torch.arange(case.classes) < labels[:, None])
    assert torch.equal(mine.above, ((logits > own) | first).sum(1))
    values, classes = logits.topk(min(top, case.classes), dim=1)
    if case.scale:
        assert torch.equal(mine.classes, classes)
    return largest((mine.values, values), (mine.log_sum, logits.logsumexp(1)), (mine.label_logit, own[:, 0]))


class Largest(TorchDispatchMode):
    """Record the largest number of values in any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.values = max(self.values, one.numel())
        return found


def largest_tensor(case: Case) -> int:
    data, (_, divided) = Data(case), heads(case)
    with Largest() as seen:
        data.divided_loss(divided, data.x[data.own].requires_grad_(), case.smoothing).backward()
        divided.score(data.x[data.own], data.classes[data.own, 0], 5)
    return seen.values


def in_bfloat16(case: Case) -> tuple[float, float, str]:
    """Return the errors of the loss and the feature gradient under autocast, and the dtype of the loss."""
    data, (dense, divided) = Data(case), heads(case)
    whole, own = data.x.clone().requires_grad_(), data.x[data.own].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = dense(whole).float()
    expected = data.dense_loss(logits, case.smoothing)
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = data.divided_loss(divided, own, case.smoothing)
    loss.backward()
    difference = (own.grad - whole.grad[data.own]).abs().max() / whole.grad.abs().max()
    return float((loss - expected).abs()), float(difference), str(loss.dtype)


def error_of(classes: int) -> str:
    try:
        DividedLinear(4, classes)
    except UsageError as error:
        return str(error)
    return ""


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=() if n == 3 else pytest.mark.slow) for n in WORLDS]
)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


BASE = Case()
# Each case differs from the base in one respect.
CASES = {
    "smoothing, mixup, class weights, unequal shares": BASE,
    "one class per image": replace(BASE, targets=1),
    "no smoothing": replace(BASE, smoothing=0.0),
    "no class weights": replace(BASE, weighted=False),
    "no bias": replace(BASE, bias=False),
    "equal shares": replace(BASE, counts=(3,)),
    "a process without images": replace(BASE, counts=(3, 0, 2, 1)),
    "all labels in the classes of the first process": replace(BASE, labels=2),
    "one label, twice in every image": replace(BASE, labels=1),
    "as few classes as processes": replace(BASE, classes=4),
    "logits up to thousands": replace(BASE, scale=1e4),
    "a thousand classes": replace(BASE, classes=1001, features=20, counts=(7, 5)),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_dense_classifier(
    group: Group, name: str, dtype: torch.dtype
) -> None:
    errors = group.call(once, replace(CASES[name], dtype=dtype))
    assert max(errors) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ten_steps_are_those_of_one_process(group: Group, optimizer: str, dtype: torch.dtype) -> None:
    errors = group.call(steps, replace(BASE, dtype=dtype), optimizer)
    assert max(errors) <= TOLERANCES[dtype]


# The processes are reused, so an example takes milliseconds.
@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(lambda counts: sum(counts[:2])),
    classes=st.integers(4, 40),
    features=st.integers(1, 9),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    targets=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(
    group: Group,
    counts: list[int],
    classes: int,
    features: int,
    smoothing: float,
    targets: int,
    bias: bool,
    seed: int,
) -> None:
    case = Case(tuple(counts), classes, features, smoothing=smoothing, targets=targets, bias=bias, seed=seed)
    assert max(group.call(once, case)) <= 1e-10
    assert max(group.call(scores, case, 5)) <= 1e-10


@pytest.mark.parametrize("top", [1, 5, 11, 20])
def test_top_k_is_that_of_all_logits(group: Group, top: int) -> None:
    assert max(group.call(scores, BASE, top)) <= 1e-10


def test_of_equal_logits_the_first_class_is_the_highest(group: Group) -> None:
    assert max(group.call(scores, replace(BASE, scale=0.0, bias=False), 5)) == 0


def test_neither_logits_nor_targets_of_all_classes_are_in_one_place(group: Group) -> None:
    case = replace(BASE, classes=4000, counts=(16,), features=8)
    world = len(group.call(error_of, 5))
    share = 16 * world * -(-case.classes // world)
    assert max(group.call(largest_tensor, case)) <= share < 16 * world * case.classes


def test_sums_are_in_float32_under_autocast(group: Group) -> None:
    case = replace(BASE, dtype=torch.float32, classes=1000, features=64, counts=(8,))
    for loss, gradient, dtype in group.call(in_bfloat16, case):
        assert dtype == "torch.float32"
        assert loss < 1e-5  # both classifiers have the same rounded logits
        assert gradient < 0.02  # rounded once in every process


def test_a_process_without_classes_is_refused(group: Group) -> None:
    (sentence, *others) = group.call(error_of, 1)
    assert "1 classes cannot be divided over" in sentence
    assert {sentence} == set(others)


def test_shares_are_as_even_as_possible() -> None:
    for classes in range(1, 30):
        for world in range(1, classes + 1):
            shares = [class_share(classes, rank, world) for rank in range(world)]
            assert [row for share in shares for row in share] == list(range(classes))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_needs_no_group() -> None:
    torch.manual_seed(0)
    dense, x = nn.Linear(5, 7), torch.randn(4, 5)
    torch.manual_seed(0)
    alone = DividedLinear(5, 7)
    assert torch.equal(alone.weight, dense.weight)
    assert torch.equal(alone.bias, dense.bias)
    labels = torch.tensor([0, 6, 3, 3])
    found = alone.loss(x, labels[:, None], label_smoothing=0.1).losses
    torch.testing.assert_close(
        found, F.cross_entropy(dense(x), labels, reduction="none", label_smoothing=0.1)
    )
    torch.testing.assert_close(alone(x), dense(x))
