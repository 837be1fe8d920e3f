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
    """Count FLOPs and saved bytes of each part of a model.

    Operations before the pooling belong to the backbone, those after it to the head with the loss. In the
    backward pass a part ends when the gradient of its input is computed.

    Attributes:
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass.
        copies: bytes of the parameters' copies in another dtype that are saved for backward.
        activations: bytes of all other tensors saved for backward. A shared storage counts once, in full;
            parameters do not count.
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
        # Holding the tensors prevents their addresses from being reused.
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
        """Count FLOPs for the backward pass from here on."""
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
        """Add the FLOPs since the last call to the current part, and start another part."""
        total = self._counter.get_total_flops()
        self._flops[self._part] += total - self._booked
        self._booked = total
        self._part = part

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen[storage] = tensor
            kept = self.copies if storage in self._copies.tensors else self.activations
            kept[self._part] += tensor.untyped_storage().nbytes()
        return tensor


class _Copies(TorchDispatchMode):
    """Record the copies of parameters in another dtype that autocast creates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: dict[int, Tensor] = {}
        self._parameters = {_storage(parameter) for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self._parameters:
            self.tensors[_storage(result)] = result
        return result


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
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
    """Count the gradients of input and weight; each costs as much as the forward pass."""
    *_others, transposed, _output_padding, _groups, needs_grad = options
    positions = (x if transposed else grad)[2:]
    return 2 * x[0] * prod(positions) * prod(weight) * sum(needs_grad[:2])  # type: ignore[no-any-return]


# torch does not count in-place baddbmm, which is half of the root's gradient. It counts the weight gradient
# of a convolution as if there were one group, and attention only in its GPU forms, but plans run on the CPU.
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
# Values per parameter in the optimizer's state: momentum, or two moments.
STATES: dict[Optimizer, int] = {"sgd": 1, "adamw": 2}


@dataclass(frozen=True)
class Footprint:
    """Memory and FLOPs of training a model or a part of it.

    Attributes:
        parameters: number of parameters.
        parameter_bytes: bytes of the parameters.
        gradient_bytes: bytes of the gradients of trained parameters.
        optimizer_bytes: bytes of the optimizer's state.
        copy_bytes: bytes of the half-precision parameter copies of autocast that are saved for backward.
        activation_bytes: bytes of all other tensors saved for backward.
        forward_flops: FLOPs of the forward pass of a batch; a multiply-add counts as two.
        backward_flops: FLOPs of the backward pass of a batch.
        training_bytes: sum of all bytes, which must fit into memory.
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

    Autocast is that of the CPU: other devices keep some other operators in float32, and their kernels may
    save other tensors. Temporaries and the allocator's overhead are not counted.

    Args:
        model: a model on the meta device. Its parameters are fake afterwards, so do not use it again.
        batch_size: images per step.
        precision: float32 or the autocast precision; parameters stay in float32.
        optimizer: ``"sgd"`` with momentum, or ``"adamw"``.

    Raises:
        ValueError: if the step fails, for example on images that are too small.
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
    """Run the step on fake or real tensors."""
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
    """Return channels, height and width of the images."""
    channels, height, width = model.pretrained_cfg["input_size"]
    return model.config.backbone_options.get("in_chans", channels), height, width


def parts_of(model: PooledClassifier) -> dict[Part, list[nn.Module]]:
    """Return the modules of every part; first-order logits belong to the head."""
    joined = [] if model.first_order is None else [model.first_order]
    return {"backbone": model.backbone_parts(), "pooling": [model.pool], "head": [model.head, *joined]}


def state_of(modules: list[nn.Module], optimizer: Optimizer) -> dict[str, int]:
    """Return the number of parameters, and the bytes of parameters, gradients and optimizer state."""
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
    # torch logs the traceback of an operator that fails on fake tensors, and then raises the error too.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        # Some networks have tensors that are neither parameters nor buffers and stay on the meta device.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before
