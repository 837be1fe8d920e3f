"""Compare a function with its compiled form, its exported form and its ONNX Runtime form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from tests.functional.tolerances import assert_close

Function = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]

BATCH = {0: torch.export.Dim.DYNAMIC}


def value_and_gradients(function: Function, inputs: Inputs) -> list[Tensor]:
    """Return the value and the gradient with respect to every floating-point input."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = function(*leaves)
    upstream = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
    return [y.detach(), *grad(y, [leaf for leaf in leaves if leaf.requires_grad], upstream)]


def check_compiled(function: Function, backend: str, *sizes: Inputs) -> None:
    """Check value and gradient of the function compiled as one graph, for all sizes without recompilation."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for n, inputs in enumerate(sizes):
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            one, other = value_and_gradients(compiled, inputs), value_and_gradients(function, inputs)
        for a, b in zip(one, other, strict=True):
            assert_close(a, b, relative=1e-5)


def check_exported(module: nn.Module, example: Inputs, others: Sequence[Inputs]) -> None:
    """Check value and gradient of the module exported with a dynamic batch, on other batch sizes."""
    program = torch.export.export(module, example, dynamic_shapes=(BATCH,) * len(example)).module()
    for inputs in others:
        for a, b in zip(
            value_and_gradients(program, inputs), value_and_gradients(module, inputs), strict=True
        ):
            assert_close(a, b, relative=1e-5)


def check_onnx(module: nn.Module, path: Path, example: Inputs, others: Sequence[Inputs]) -> None:
    """Check the value under ONNX Runtime on other batch sizes."""
    onnxruntime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(
        module, example, dynamo=True, dynamic_shapes=(BATCH,) * len(example), verbose=False
    )
    assert program is not None
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    for inputs in others:
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        (result,) = session.run(None, feed)
        assert_close(torch.from_numpy(result), module(*inputs).detach(), relative=1e-5)
