"""``covpool plan``: see :func:`covpool.models.plan.plan`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from covpool.models.plan import Plan

EXAMPLE = "covpool plan resnet18 --num-classes 200"


@dataclass(frozen=True)
class Arguments:
    """Print parameters, memory and FLOPs of training a network, and recommend a head.

    It allocates and downloads nothing, so any size is possible.

    Attributes:
        backbone: name of a timm model, or ``alexnet``.
        num_classes: number of classes; 0 for no classifier.
        batch_size: images per training step, on a GPU.
        precision: autocast precision; the parameters stay in float32.
        optimizer: ``sgd`` has momentum.
        processes: number of GPUs that train together, one process each; compares a sharded classifier.
        image_size: image size in pixels; the backbone's own if not given.
        pool: the pooling method; ``gap`` is average pooling.
        dim: channels after the reduction; ``none`` for no reduction, ``auto`` for 256 where the backbone has
            more.
        keep_resolution: remove the stride of the last stage; done where possible if not given.
        rank: rank of a bottleneck before the classifier; no bottleneck if not given.
        head: ``mlp`` for hidden layers before the classifier.
        hidden: widths of the layers of ``mlp``, as ``[4096,4096]``, the default.
        join: add first-order logits from the class token (``cls``) or from average pooling (``gap``).
        pool_options: options of the pooling method, as ``{"steps": 4}``.
        backbone_options: options of timm's create_model, as ``{"drop_path_rate": 0.1}``.
    """

    backbone: str
    num_classes: int = 1000
    batch_size: int = 256
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    processes: int = 1
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

    given = {**vars(arguments), "dim": None if arguments.dim == "none" else arguments.dim}
    config = ModelConfig(
        **{field.name: given[field.name] for field in fields(ModelConfig) if field.name in given}
    )
    return plan(
        config,
        batch_size=arguments.batch_size,
        precision=arguments.precision,
        optimizer=arguments.optimizer,
        processes=arguments.processes,
    )


def text(result: "Plan") -> str:
    """Return the plan as a table, and a recommendation."""
    from covpool.models.plan import plan_text

    return plan_text(result)
