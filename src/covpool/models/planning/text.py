"""A plan as a person reads it: aligned columns, units, and the recommendation in words."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from covpool.models.planning.plan import DENSE_CLASSES, LOW_RANK_CLASSES, NARROW_DIM, RANK, Plan

COLUMNS = 100
PREFIXES = ("", "k", "M", "G", "T", "P", "E")
NOTES = (
    "Activations are what autograd keeps for the backward pass. Temporaries come on top of what must fit. "
    "A multiplication with its addition is two FLOPs."
)


def plan_text(plan: Plan) -> str:
    """The plan in no more than 100 columns."""
    paragraphs = [_heading(plan), aligned(_costs(plan)), fill(NOTES, COLUMNS)]
    if plan.heads:
        paragraphs.append(aligned(_heads(plan)))
    return "\n\n".join([*paragraphs, fill(advice(plan), COLUMNS)])


def advice(plan: Plan) -> str:
    """The recommendation for the plan's number of classes, in words."""
    low_rank = f"a low-rank head, rank={RANK}"
    if plan.recommendation is None:
        return f"No classifier: the {plan.vector:,} numbers are the output."
    if plan.recommendation == "dense":
        return f"Recommended up to {DENSE_CLASSES:,} classes: a dense head."
    if plan.recommendation == "low rank or narrow":
        can_narrow = any(head.name == f"dim {NARROW_DIM}" for head in plan.heads)
        narrow = f", or a narrower covariance, dim={NARROW_DIM}" if can_narrow else ""
        return (
            f"Recommended past {DENSE_CLASSES:,} and up to {LOW_RANK_CLASSES:,} classes: {low_rank}{narrow}."
        )
    return (
        f"Recommended past {LOW_RANK_CLASSES:,} classes: a class-sharded head, where every GPU holds a share "
        f"of the classes. It is planned: covpool does not have it yet. Until then, {low_rank}, grows least."
    )


def human(number: float, unit: str = "") -> str:
    """Three digits and a prefix.

    Example:
        >>> human(56_929_832), human(16.54e9, "B"), human(999_999, "B"), human(7, "B")
        ('56.9 M', '16.5 GB', '1.00 MB', '7 B')
    """
    power = 0
    while number >= 999.5 and power < len(PREFIXES) - 1:
        number, power = number / 1000, power + 1
    decimals = 0 if not power or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f} {PREFIXES[power]}{unit}".rstrip()


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _heading(plan: Plan) -> str:
    config = plan.config
    channels, height, width = plan.image
    reduced = f" of {config.dim} channels" if config.dim else ""
    return (
        f"{config.backbone}, {config.pool}{reduced} ({plan.vector:,} numbers), "
        f"{config.num_classes:,} classes\n"
        f"training on images {channels}×{height}×{width}, batch {plan.batch_size}, {plan.precision}, "
        f"{plan.optimizer}"
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
    rows = [["head", "parameters", "weights", f"with gradients and {plan.optimizer} state"]]
    for index, head in enumerate(plan.heads):
        note = " (this plan)" if index == 0 else "" if head.exists else " (planned)"
        costs = human(head.parameters), human(head.parameter_bytes, "B"), human(head.state_bytes, "B")
        rows.append([head.name + note, *costs])
    return rows
