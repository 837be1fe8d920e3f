"""Measure the memory and FLOPs of a model.

The step is the model's own forward and backward pass, in the given batch size and precision, on fake tensors
with shapes and dtypes but no data. So ten million classes take no longer than ten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from covpool.errors import UsageError
from covpool.models.model import PooledClassifier

Part = Literal["backbone", "pooling", "head"]
PARTS: tuple[Part, ...] = ("backbone", "pooling", "head")


class Meter:
    """Knows which part of a model is at work, and books what happens on it.

    Before the pooling it is the backbone, after it the head with the loss. The backward pass runs the other
    way round: a part is through when the gradient of what it received is there.

    Attributes:
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass.
        copies: bytes of the parameters' copies in another dtype, as far as autograd keeps them.
        activations: bytes of all else that autograd keeps. Storages count once and whole, parameters do not.
    """

    def __init__(self, model: PooledClassifier) -> None:
        self.forward = dict.fromkeys(PARTS, 0)
        self.backward = dict.fromkeys(PARTS, 0)
        self.copies = dict.fromkeys(PARTS, 0)
        self.activations = dict.fromkeys(PARTS, 0)
        self._model = model
        self._counter = FlopCounterMode(display=False, custom_mapping=MISCOUNTED)
        self._copies = _Copies(model)
        self._flops = self.forward
        self._booked = 0
        self._part: Part = "backbone"
        # With the tensors themselves: a freed one's address would be given out again.
        self._seen: dict[int, Tensor] = {_storage(parameter): parameter for parameter in model.parameters()}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the forward and backward pass inside."""
        hooks = (
            self._model.pool.register_forward_pre_hook(self._pooling_begins),
            self._model.pool.register_forward_hook(self._pooling_ends),
        )
        try:
            with self._counter, self._copies, saved_tensors_hooks(self._keep, lambda kept: kept):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._enter("backbone")

    def backward_begins(self) -> None:
        """Book on the backward pass from here."""
        self._enter("head")
        self._flops = self.backward

    def _pooling_begins(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._enter("pooling")
        inputs[0].register_hook(self._entering("backbone"))

    def _pooling_ends(self, module: nn.Module, inputs: tuple[Tensor, ...], vector: Tensor) -> None:
        self._enter("head")
        vector.register_hook(self._entering("pooling"))

    def _entering(self, part: Part) -> Callable[[Tensor], None]:
        return lambda gradient: self._enter(part)

    def _enter(self, part: Part) -> None:
        """Book what was counted since the last time on the part that was at work until now."""
        total = self._counter.get_total_flops()
        self._flops[self._part] += total - self._booked
        self._booked = total
        self._part = part

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen[storage] = tensor
            kept = self.copies if storage in self._copies.made else self.activations
            kept[self._part] += tensor.untyped_storage().nbytes()
        return tensor


class _Copies(TorchDispatchMode):
    """Notes the tensors that are a parameter in another dtype: autocast makes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, Tensor] = {}
        self._parameters = {_storage(parameter) for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self._parameters:
            self.made[_storage(result)] = result
        return result


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's storage, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def _baddbmm_flops(total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    return 2 * prod(left) * right[-1]


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _convolution_backward_flops(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *options: Any, **_: Any
) -> int:
    """The gradient of the input and that of the weight each cost what the forward pass does."""
    *_others, transposed, _output_padding, _groups, wanted = options
    positions = (x if transposed else grad)[2:]
    return 2 * x[0] * prod(positions) * prod(weight) * (wanted[0] + wanted[1])  # type: ignore[no-any-return]


# torch does not count the in-place form of baddbmm, which half of the root's gradient is made of, and it
# counts the weight's gradient in a convolution as if that had a single group. Of attention it counts the
# forms of a GPU, and plans are made on the CPU.
MISCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.baddbmm_: _baddbmm_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
}


Precision = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["sgd", "adamw"]

PRECISIONS: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Numbers that the optimizer keeps for each parameter: a momentum; two moments.
STATES: dict[Optimizer, int] = {"sgd": 1, "adamw": 2}


@dataclass(frozen=True)
class Footprint:
    """What training keeps in memory and computes, for a part of a model or the whole.

    Attributes:
        parameters: how many.
        parameter_bytes: theirs.
        gradient_bytes: of the parameters that are trained.
        optimizer_bytes: of the optimizer's state.
        copy_bytes: of the parameters' copies in half precision that autocast makes and autograd keeps.
        activation_bytes: of all else that autograd keeps from the forward pass for the backward.
        forward_flops: of a batch; a multiplication with its addition counts as two.
        backward_flops: likewise.
        training_bytes: the sum of all bytes: what must fit.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    copy_bytes: int = 0
    activation_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    training_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        kept = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        object.__setattr__(self, "training_bytes", kept + self.copy_bytes + self.activation_bytes)


def footprints(
    model: PooledClassifier, *, batch_size: int, precision: Precision, optimizer: Optimizer
) -> dict[Part, Footprint]:
    """Measure a training step with cross-entropy.

    Autocast is the CPU's: another device's leaves a few other operators in float32, and its kernels may keep
    other tensors for their gradient. Temporaries and what an allocator wastes are not counted.

    Args:
        model: on the meta device. It ends on the CPU, with fake parameters: it is of no further use.
        batch_size: images in a step.
        precision: float32, or that of autocast; the parameters stay in float32.
        optimizer: ``"sgd"`` with momentum, or ``"adamw"``.

    Raises:
        ValueError: where the step fails, as on images that are too small.
    """
    try:
        with _fake_tensors():
            meter = measure(model.to_empty(device="cpu"), batch_size, precision)
    except (AssertionError, RuntimeError, ValueError) as error:
        size = "×".join(map(str, input_size(model)))
        raise UsageError(f"{model.config.backbone} fails on {batch_size} images {size}: {error}") from error
    return {
        part: Footprint(
            **state_of(modules, optimizer),
            copy_bytes=meter.copies[part],
            activation_bytes=meter.activations[part],
            forward_flops=meter.forward[part],
            backward_flops=meter.backward[part],
        )
        for part, modules in parts_of(model).items()
    }


def measure(model: PooledClassifier, batch_size: int, precision: Precision) -> Meter:
    """Run the step, on tensors fake or real."""
    model.train()
    images = torch.zeros(batch_size, *input_size(model))
    labels = torch.zeros(batch_size, dtype=torch.long)
    meter = Meter(model)
    with meter.running():
        with torch.autocast("cpu", PRECISIONS[precision], enabled=precision != "float32"):
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels) if model.num_classes else outputs.sum()
        meter.backward_begins()
        loss.backward()
    return meter


def input_size(model: PooledClassifier) -> tuple[int, int, int]:
    """Channels, height and width of the images."""
    channels, height, width = model.pretrained_cfg["input_size"]
    return model.config.backbone_options.get("in_chans", channels), height, width


def parts_of(model: PooledClassifier) -> dict[Part, list[nn.Module]]:
    """The modules of every part; first-order logits, which are added to the head's, belong to it."""
    joined = [] if model.first_order is None else [model.first_order]
    return {"backbone": model.backbone_parts(), "pooling": [model.pool], "head": [model.head, *joined]}


def state_of(modules: list[nn.Module], optimizer: Optimizer) -> dict[str, int]:
    """Parameters, and the bytes of them, of their gradients and of the optimizer's state."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        "gradient_bytes": trained,
        "optimizer_bytes": STATES[optimizer] * trained,
    }


@contextmanager
def _fake_tensors() -> Iterator[None]:
    # torch logs an operator that fails on fake tensors with its traceback, and then raises the error as well.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        # Some networks keep tensors that are neither parameters nor buffers, and so stay on the meta device.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before
