"""Plan a training run: memory, FLOPs and the recommended head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Literal

import torch

from covpool.arguments import FROZEN_DIM, check_choice, check_whole
from covpool.models.backbone import Backbone
from covpool.models.config import ModelConfig
from covpool.models.create import build_model
from covpool.models.footprint import (
    PRECISIONS,
    STATES,
    Footprint,
    Optimizer,
    Precision,
    footprints,
    input_size,
    parts_of,
    state_of,
)
from covpool.models.model import PooledClassifier
from covpool.terminal import aligned, human

Recommendation = Literal["linear", "low rank or narrow", "class-divided"]
# The most classes for which a linear head, and for which a low-rank or narrow one, is recommended.
LINEAR_CLASSES, LOW_RANK_CLASSES = 10_000, 100_000
# The alternative heads in the plan. The narrow one is as wide as heads on a frozen backbone.
RANK, NARROW_DIM, PARTS = 512, FROZEN_DIM, (8, 64)


@dataclass(frozen=True)
class HeadChoice:
    """A head for the same classes, and its cost.

    Attributes:
        name: ``"linear"``, ``"rank 512"``, ``"dim 128"``, ``"linear, 1 of 8 parts"``.
        parameters: number of parameters per GPU.
        parameter_bytes: bytes of the parameters.
        state_bytes: bytes of parameters, gradients and optimizer state together.
        sent_bytes: bytes that each process sends per step for this head; 0 for one process.
    """

    name: str
    parameters: int
    parameter_bytes: int
    state_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Plan:
    """The cost of training a model. ``dataclasses.asdict`` converts it for JSON.

    Attributes:
        config: config of the model, with all defaults filled in.
        batch_size: images per step and GPU.
        precision: float32 or the autocast precision.
        optimizer: ``"sgd"`` with momentum, or ``"adamw"``.
        processes: number of processes, one per GPU.
        image: channels, height and width.
        vector: length of the pooled vector.
        backbone: footprint of the backbone.
        pooling: footprint of the reduction and the root.
        head: footprint of the classifier and the loss.
        total: footprint of all three.
        heads: the planned head first, then its alternatives.
        recommendation: kind of head for this number of classes; ``None`` without a classifier.
    """

    config: ModelConfig
    batch_size: int
    precision: Precision
    optimizer: Optimizer
    processes: int
    image: tuple[int, int, int]
    vector: int
    backbone: Footprint
    pooling: Footprint
    head: Footprint
    total: Footprint
    heads: tuple[HeadChoice, ...]
    recommendation: Recommendation | None


def plan(
    config: ModelConfig,
    *,
    batch_size: int = 256,
    precision: Precision = "bfloat16",
    optimizer: Optimizer = "sgd",
    processes: int = 1,
) -> Plan:
    """Plan the training of a model without allocating it.

    Example:
        >>> costs = plan(ModelConfig("resnet50", num_classes=1000), batch_size=32)
        >>> costs.total.parameters, costs.head.parameters
        (56929832, 32897000)
        >>> costs.recommendation
        'linear'
    """
    check_choice("precision", precision, PRECISIONS)
    check_choice("optimizer", optimizer, STATES)
    check_whole("batch_size", batch_size)
    check_whole("processes", processes)
    with torch.device("meta"):
        model = build_model(config)
        heads = head_choices(model, optimizer, processes, batch_size, PRECISIONS[precision].itemsize)
    parts = footprints(model, batch_size=batch_size, precision=precision, optimizer=optimizer)
    return Plan(
        config=model.config,
        batch_size=batch_size,
        precision=precision,
        optimizer=optimizer,
        processes=processes,
        image=input_size(model),
        vector=model.pool.out_features,
        **parts,
        total=_sum(list(parts.values())),
        heads=heads,
        recommendation=recommend(config.num_classes, heads),
    )


def recommend(num_classes: int, heads: Sequence[HeadChoice] = ()) -> Recommendation | None:
    """Return the recommended kind of head.

    A divided head computes the same as a linear one and takes less memory. So it is recommended if its
    processes also send less, which is nearly always so if there are more classes than images in a batch.
    """
    if num_classes == 0:
        return None
    divided = [head for head in heads[1:] if head.name.endswith("parts") and head.sent_bytes]
    if divided and divided[0].sent_bytes < heads[0].sent_bytes:
        return "class-divided"
    if num_classes <= LINEAR_CLASSES:
        return "linear"
    return "low rank or narrow" if num_classes <= LOW_RANK_CLASSES else "class-divided"


# Bytes of an image besides its features: two classes with shares, a maximum, three sums and a prediction. The
# latter are reduced, which sends them twice.
PER_IMAGE = 2 * 16 + 2 * (4 + 12 + 8)


def sent_by_copies(parameter_bytes: int, processes: int) -> int:
    """Return the bytes that a process sends per step for the gradients of parameters that all hold."""
    return round(2 * parameter_bytes * (processes - 1) / processes)


def sent_by_parts(images: int, features: int, itemsize: int, processes: int) -> int:
    """Return the bytes that a process sends per step for a divided classifier.

    Args:
        images: images per step, over all processes.
        features: D, the input of the classifier.
        itemsize: bytes of a feature that is sent; its gradient is in float32.
        processes: number of processes.
    """
    per_image = features * (itemsize + 4) + PER_IMAGE
    return round(images * per_image * (processes - 1) / processes)


def _sum(parts: list[Footprint]) -> Footprint:
    names = [f.name for f in dataclasses.fields(Footprint) if f.init]
    return Footprint(**{name: sum(getattr(part, name) for part in parts) for name in names})


def head_choices(
    model: PooledClassifier,
    optimizer: Optimizer,
    processes: int = 1,
    batch_size: int = 1,
    itemsize: int = 4,
) -> tuple[HeadChoice, ...]:
    """Return the model's head, the linear head, smaller heads, and parts of a head that is divided by class.

    Parts are for several processes. For one process they are listed above LOW_RANK_CLASSES.

    Args:
        model: a model on the meta device, which must be torch's default device.
        optimizer: the optimizer, whose state is part of the cost.
        processes: number of processes.
        batch_size: images per step and process.
        itemsize: bytes of a value in the precision of the features.
    """
    config = model.config
    if config.num_classes == 0:
        return ()
    linear = dataclasses.replace(config, head="linear", rank=None)
    asked, reference = (_head(model, _name(c), c, optimizer, processes) for c in (config, linear))
    others = [_head(model, _name(c), c, optimizer, processes) for c in _alternatives(model, linear)]
    smaller = [choice for choice in others if choice.parameters < reference.parameters]
    alone = PARTS if recommend(config.num_classes) == "class-divided" else ()
    counts: tuple[int, ...] = () if config.join else alone if processes == 1 else (processes,)
    parts = [_part(model, asked.name, count, optimizer) for count in counts if count <= config.num_classes]
    if processes > 1:
        width = model.head.hidden_size
        hidden = sent_by_copies(4 * sum(p.numel() for p in model.head.hidden.parameters()), processes)
        sent = hidden + sent_by_parts(batch_size * processes, width, itemsize, processes)
        parts = [dataclasses.replace(part, sent_bytes=sent) for part in parts]
    return tuple(dict.fromkeys((asked, reference, *smaller, *parts)))  # removes duplicates


def _alternatives(model: PooledClassifier, linear: ModelConfig) -> list[ModelConfig]:
    low_rank = dataclasses.replace(linear, rank=RANK)
    narrow = dataclasses.replace(linear, dim=NARROW_DIM)
    can_narrow = linear.is_second_order and (linear.dim or model.pool.in_channels) != NARROW_DIM
    return [low_rank, narrow] if can_narrow else [low_rank]


def _name(config: ModelConfig) -> str:
    if config.head == "mlp":
        return f"hidden {'-'.join(map(str, config.hidden))}"
    if config.rank is not None:
        return f"rank {config.rank}"
    return f"dim {config.dim}" if config.dim == NARROW_DIM else "linear"


def _part(model: PooledClassifier, name: str, count: int, optimizer: Optimizer) -> HeadChoice:
    """Return the planned head with a share of the classes; its hidden layers are on every GPU."""
    part = dataclasses.replace(model.config, num_classes=-(-model.config.num_classes // count))
    return _head(model, f"{name}, 1 of {count} parts", part, optimizer)


def _head(
    model: PooledClassifier, name: str, config: ModelConfig, optimizer: Optimizer, processes: int = 1
) -> HeadChoice:
    """Return the cost of another config's head on the same backbone."""
    kept = bool(config.keep_resolution)
    backbone = Backbone(model.backbone, model.format, kept, model.expansion, model.expanded_channels)
    costs = Footprint(**state_of(parts_of(PooledClassifier(config, backbone))["head"], optimizer))
    sent = sent_by_copies(costs.parameter_bytes, processes)
    return HeadChoice(name, costs.parameters, costs.parameter_bytes, costs.training_bytes, sent)


COLUMNS = 100
NOTES = (
    "Activations are the tensors saved for backward. Temporaries need further memory. "
    "A multiply-add counts as two FLOPs."
)


def plan_text(plan: Plan) -> str:
    """Return the plan as text of at most 100 columns."""
    paragraphs = [_heading(plan), aligned(_costs(plan)), fill(NOTES, COLUMNS)]
    if plan.heads:
        paragraphs.append(aligned(_heads(plan)))
    return "\n\n".join([*paragraphs, fill(advice(plan), COLUMNS)])


def advice(plan: Plan) -> str:
    """Return the recommendation for the plan's number of classes."""
    low_rank = f"a low-rank head, rank={RANK}"
    if plan.recommendation is None:
        return f"No classifier: the output is the vector of {plan.vector:,} values."
    if plan.recommendation == "linear":
        return f"Recommended up to {LINEAR_CLASSES:,} classes: a linear head (one layer, full rank)."
    if plan.recommendation == "low rank or narrow":
        can_narrow = any(head.name == f"dim {NARROW_DIM}" for head in plan.heads)
        narrow = f", or a narrower covariance, dim={NARROW_DIM}" if can_narrow else ""
        return (
            f"Recommended past {LINEAR_CLASSES:,} and up to {LOW_RANK_CLASSES:,} classes: {low_rank}{narrow}."
        )
    if plan.processes == 1:
        return (
            f"Recommended past {LOW_RANK_CLASSES:,} classes: a class-divided head on several GPUs, each with "
            "some of the classes: --loop.divide-classes true of covpool train. --processes 8 is for 8 GPUs. "
            f"On one GPU, {low_rank}, grows least."
        )
    replicated, part = plan.heads[0], plan.heads[-1]
    return (
        f"Recommended on {plan.processes} GPUs: a class-divided head, --loop.divide-classes true of covpool "
        f"train. It computes the same, takes {human(part.state_bytes, 'B')} per GPU instead of "
        f"{human(replicated.state_bytes, 'B')}, and each GPU sends {human(part.sent_bytes, 'B')} per step "
        f"instead of {human(replicated.sent_bytes, 'B')}."
    )


def _heading(plan: Plan) -> str:
    config = plan.config
    channels, height, width = plan.image
    reduced = f" of {config.dim} channels" if config.dim else ""
    return (
        f"{config.backbone}, {config.pool}{reduced} ({plan.vector:,} values), "
        f"{config.num_classes:,} classes\n"
        f"training on images {channels}×{height}×{width}, batch {plan.batch_size}, {plan.precision}, "
        f"{plan.optimizer}{f', {plan.processes} GPUs' if plan.processes > 1 else ''}"
    )


def _costs(plan: Plan) -> list[list[str]]:
    parts = {"backbone": plan.backbone, "pooling": plan.pooling, "head": plan.head, "total": plan.total}

    def row(label: str, name: str, unit: str, share: int = 1) -> list[str]:
        return [label, *(human(getattr(part, name) / share, unit) for part in parts.values())]

    copies = [] if plan.precision == "float32" else [row(f"{plan.precision} copies", "copy_bytes", "B")]
    return [
        ["", *parts],
        row("parameters", "parameters", ""),
        row("weights", "parameter_bytes", "B"),
        row("gradients", "gradient_bytes", "B"),
        row(f"{plan.optimizer} state", "optimizer_bytes", "B"),
        *copies,
        row("activations", "activation_bytes", "B"),
        row("must fit", "training_bytes", "B"),
        row("forward, an image", "forward_flops", "FLOPs", plan.batch_size),
        row("backward, an image", "backward_flops", "FLOPs", plan.batch_size),
    ]


def _heads(plan: Plan) -> list[list[str]]:
    several = plan.processes > 1
    rows = [["head", "parameters", "weights", f"with gradients and {plan.optimizer} state"]]
    rows[0] += ["sent per step"] if several else []
    for index, head in enumerate(plan.heads):
        note = " (this plan)" if index == 0 else ""
        costs = human(head.parameters), human(head.parameter_bytes, "B"), human(head.state_bytes, "B")
        rows.append([head.name + note, *costs, *([human(head.sent_bytes, "B")] if several else [])])
    return rows
