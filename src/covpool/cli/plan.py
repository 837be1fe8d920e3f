"""``covpool plan``: see :func:`covpool.models.plan.plan`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from covpool.models.plan import Plan

EXAMPLE = "covpool plan resnet18 --num-classes 200"


@dataclass(frozen=True)
class Arguments:
    """Print what training a network takes (parameters, memory, FLOPs), and the head to take.

    Nothing is allocated or downloaded, so any size can be asked for.

    Attributes:
        backbone: a name of timm, or ``alexnet``.
        num_classes: 0 for no classifier.
        batch_size: images in a step, on a GPU.
        precision: of autocast; the parameters stay in float32.
        optimizer: ``sgd`` has a momentum.
        image_size: the side of the images; the backbone's own if not given.
        pool: the pooling method; ``gap`` is average pooling.
        dim: channels after the reduction; ``none`` for no reduction, ``auto`` for 256 where the backbone has
            more.
        keep_resolution: leave out the last halving of the resolution; where possible if not given.
        rank: of the bottleneck before the classifier; none if not given.
        head: ``mlp`` for hidden layers before the classifier.
        hidden: widths of the layers of ``mlp``, as ``[4096,4096]``, the default.
        join: add first-order logits: ``cls``, of the class token, or ``gap``, of the average.
        pool_options: of the method, as ``{"steps": 3}``.
        backbone_options: for timm's create_model, as ``{"drop_path_rate": 0.1}``.
    """

    backbone: str
    num_classes: int = 1000
    batch_size: int = 256
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    image_size: int | None = None
    pool: str = "isqrt_cov"
    dim: int | Literal["auto", "none"] = "auto"
    keep_resolution: bool | None = None
    rank: int | None = None
    head: Literal["linear", "mlp"] = "linear"
    hidden: tuple[int, ...] = (4096, 4096)
    join: Literal["cls", "gap"] | None = None
    pool_options: dict[str, Any] = field(default_factory=dict)
    backbone_options: dict[str, Any] = field(default_factory=dict)


def run(arguments: Arguments) -> "Plan":
    """Plan the model."""
    from covpool.models.config import ModelConfig
    from covpool.models.plan import plan

    config = ModelConfig(
        backbone=arguments.backbone,
        num_classes=arguments.num_classes,
        pool=arguments.pool,
        dim=None if arguments.dim == "none" else arguments.dim,
        keep_resolution=arguments.keep_resolution,
        head=arguments.head,
        rank=arguments.rank,
        hidden=arguments.hidden,
        join=arguments.join,
        image_size=arguments.image_size,
        pool_options=arguments.pool_options,
        backbone_options=arguments.backbone_options,
    )
    return plan(
        config,
        batch_size=arguments.batch_size,
        precision=arguments.precision,
        optimizer=arguments.optimizer,
    )


def text(result: "Plan") -> str:
    """The plan as a table and a recommendation."""
    from covpool.models.plan import plan_text

    return plan_text(result)
