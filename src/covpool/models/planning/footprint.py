"""What a training step of a model costs, part by part, measured without memory for a single number.

The step is real: the model's own forward and backward, in the batch size and precision asked for. Only the
tensors are fake, shapes and dtypes without data, so ten million classes take no longer than ten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from covpool.models.model import PooledClassifier
from covpool.models.planning.meter import Meter, Part

Precision = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["sgd", "adamw"]

PRECISIONS: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Numbers that the optimiser keeps for each parameter: a momentum; two moments.
STATES: dict[Optimizer, int] = {"sgd": 1, "adamw": 2}


@dataclass(frozen=True)
class Footprint:
    """What training keeps in memory and computes, for a part of a model or the whole.

    Attributes:
        parameters: how many.
        parameter_bytes: theirs.
        gradient_bytes: of the parameters that are trained.
        optimizer_bytes: of the optimiser's state.
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
        raise ValueError(f"{model.config.backbone} fails on {batch_size} images {size}: {error}") from error
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
    """Parameters, and the bytes of them, of their gradients and of the optimiser's state."""
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
