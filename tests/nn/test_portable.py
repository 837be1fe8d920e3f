"""The layer under torch.compile, torch.export, ONNX Runtime, torch.func and checkpointing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from covpool.nn import CovPool, NewtonSchulz, PostCompensation, PreNormalization
from tests.functional.portability import check_compiled, check_exported, check_onnx
from tests.functional.tolerances import assert_close

C, D = 10, 4

# torch's own code raises these warnings during tracing and code generation.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# Options of the layer, input shapes for one graph, and whether there is a mask. With a convolution, only the
# batch size differs: inductor makes the other sizes of a convolution constants.
CASES = {
    "map": ({"dim": D}, ((3, C, 4, 5), (6, C, 4, 5)), False),
    "masked map": ({"dim": D}, ((3, C, 4, 5), (6, C, 4, 5)), True),
    "tokens": ({"dim": D, "layout": "channels_last"}, ((3, 20, C), (5, 18, C)), False),
    "positions side": ({"dim": None, "side": "positions"}, ((3, C, 2, 4), (6, C, 5, 2)), False),
    "batchnorm": ({"dim": D, "compensation": "batchnorm"}, ((3, C, 4, 5), (6, C, 4, 5)), False),
    "swin, linear": (
        {"dim": D, "layout": "channels_last", "reduction": "linear"},
        ((3, 4, 5, C), (5, 6, 3, C)),
        False,
    ),
}


def cases(*fast: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in CASES]
    )


def make(case: str) -> tuple[CovPool, list[tuple[Tensor, ...]]]:
    """Return the layer with random BatchNorm parameters and statistics, and inputs of two sizes."""
    options, shapes, masked = CASES[case]
    pool = CovPool(C, **options)
    for name, tensor in pool.state_dict().items():
        if name.endswith(("norm.weight", "running_var")):
            nn.init.uniform_(tensor, 0.5, 2.0)
        elif name.endswith(("norm.bias", "running_mean")):
            nn.init.normal_(tensor, std=0.3)
    inputs = []
    for shape in shapes:
        x = torch.randn(shape)
        inputs.append((x, torch.rand(shape[0], *shape[2:]) > 0.3) if masked else (x,))
    return pool, inputs


def everything(pool: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the result, all gradients, and the BatchNorm statistics afterwards."""
    pool.zero_grad()
    x = inputs[0].clone().requires_grad_()
    y = pool(x, *inputs[1:])
    (y * torch.sin(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)).sum().backward()
    gradients = {f"{name}.grad": p.grad.clone() for name, p in pool.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in pool.named_buffers()}
    return {"y": y.detach(), "x.grad": x.grad, **gradients, **buffers}


def assert_all_close(one: dict[str, Tensor], other: dict[str, Tensor], relative: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        if one[name].is_floating_point():
            # The gradient of a bias before a covariance is only rounding.
            size = max(other[name].abs().max().item(), 1.0)
            torch.testing.assert_close(one[name], other[name], rtol=0.0, atol=relative * size, msg=name)
        else:
            assert torch.equal(one[name], other[name]), name


def check_trained_compiled(case: str, backend: str) -> None:
    torch.compiler.reset()
    pool, sizes = make(case)
    eager = copy.deepcopy(pool)
    compiled = torch.compile(pool, fullgraph=True, dynamic=True, backend=backend)
    for n, inputs in enumerate(sizes):
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got = everything(compiled, inputs)
        got = {name.removeprefix("_orig_mod."): value for name, value in got.items()}
        assert_all_close(got, everything(eager, inputs))


@pytest.mark.slow
@cases("masked map")
def test_trains_traced_whole_and_dynamic(case: str) -> None:
    check_trained_compiled(case, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_trains_compiled_by_inductor(case: str) -> None:
    check_trained_compiled(case, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_structured_layers_compiled(backend: str) -> None:
    before, iteration, after = PreNormalization("frobenius"), NewtonSchulz(), PostCompensation()

    def function(x: Tensor) -> Tensor:
        a, t = before(x @ x.mT)
        return after(iteration(a), t)

    check_compiled(function, backend, *((torch.randn(shape),) for shape in ((3, 6, 9), (5, 7, 11))))


def with_another_batch(inputs: tuple[Tensor, ...], batch: int) -> tuple[Tensor, ...]:
    x, *weights = inputs
    more = torch.randn(batch, *x.shape[1:])
    return (more, *(torch.rand(batch, *w.shape[1:]) > 0.3 for w in weights))


@cases("map")
def test_exported_with_a_dynamic_batch(case: str) -> None:
    pool, (example, _) = make(case)
    others = [with_another_batch(example, batch) for batch in (1, 5)]
    check_exported(pool.eval(), example, others)


# On the channels side; the operator's own test uses the positions side.
@cases()
def test_onnx_with_a_dynamic_batch(case: str, tmp_path: Path) -> None:
    pool, (example, _) = make(case)
    others = [with_another_batch(example, batch) for batch in (1, 5)]
    check_onnx(pool.eval(), tmp_path / "pool.onnx", example, others)


@pytest.mark.parametrize("case", ["map", "tokens", "positions side"])
def test_gradients_of_each_sample(case: str) -> None:
    pool, (inputs, _) = make(case)
    pool.eval()
    parameters = {name: p.detach() for name, p in pool.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(pool, parameters, (x.unsqueeze(0),)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(parameters, inputs[0])
    for i, image in enumerate(inputs[0]):
        leaf = image.clone().requires_grad_()
        pool.zero_grad()
        pool(leaf.unsqueeze(0)).square().sum().backward()
        assert_close(each[1][i], leaf.grad)
        for name, parameter in pool.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(each[0][name][i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_gives_the_same_gradients(case: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, pool: CovPool) -> None:
            super().__init__()
            self.pool = pool

        def forward(self, *inputs: Tensor) -> Tensor:
            return checkpoint(self.pool, *inputs, use_reentrant=False)

    pool, (inputs, _) = make(case)
    pool.eval()  # in training, BatchNorm would see the batch twice, as under any checkpoint
    checkpointed = Checkpointed(copy.deepcopy(pool))
    got = everything(checkpointed, inputs)
    got = {name.removeprefix("pool."): value for name, value in got.items()}
    assert_all_close(got, everything(pool, inputs), relative=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_deep_copy_trains_as_the_original(case: str) -> None:
    pool, (inputs, _) = make(case)
    pool(*inputs)
    duplicate = copy.deepcopy(pool)
    assert_all_close(everything(duplicate, inputs), everything(pool, inputs), relative=0.0)
