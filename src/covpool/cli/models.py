"""``covpool plan``, ``push`` and ``convert``: see :mod:`covpool.models`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from covpool.cli.images import class_names
from covpool.cli.main import Command

if TYPE_CHECKING:
    from covpool.models.plan import Plan


@dataclass(frozen=True)
class PlanArguments:
    """Print parameters, memory and FLOPs of training a network, and recommend a head.

    It allocates and downloads nothing, so any size is possible.

    Attributes:
        backbone: name of a timm model, or ``alexnet``.
        num_classes: number of classes; 0 for no classifier.
        batch_size: images per training step, on a GPU.
        precision: autocast precision; the parameters stay in float32.
        optimizer: ``sgd`` has momentum.
        processes: number of GPUs that train together, one process each; compares a divided classifier.
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


def run_plan(arguments: PlanArguments) -> "Plan":
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


def text_of_plan(result: "Plan") -> str:
    """Return the plan as a table, and a recommendation."""
    from covpool.models.plan import plan_text

    return plan_text(result)


plan = Command(PlanArguments, "covpool plan resnet18 --num-classes 200", run_plan, text_of_plan)


@dataclass(frozen=True)
class PushArguments:
    """Upload a bundle to the Hugging Face Hub, with a model card.

    Log in first with hf auth login, or set HF_TOKEN. Other commands accept the result as
    hf-hub:user/name in place of a bundle.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        repository: user/name or user/name@branch on the Hub; created if it does not exist.
        license: license of the weights as the Hub names it, such as apache-2.0 or cc-by-nc-4.0.
        dataset: training data on the Hub, as user/name.
        results: folder of covpool eval for this bundle; its metrics and intervals go into the model card.
        private: a private repository.
    """

    bundle: str
    repository: str
    license: str | None = None
    dataset: str | None = None
    results: Path | None = None
    private: bool = False


@dataclass(frozen=True)
class Pushed:
    """The address with its commit."""

    address: str


def run_push(arguments: PushArguments) -> Pushed:
    """Upload the bundle."""
    from covpool.models.push import push_to_hub

    address = push_to_hub(
        arguments.bundle,
        arguments.repository,
        license=arguments.license,
        dataset=arguments.dataset,
        results=arguments.results,
        private=arguments.private,
    )
    return Pushed(address)


def text_of_push(result: Pushed) -> str:
    """Return the address, and how to use it."""
    latest = result.address.partition("@")[0]
    return f"pushed: {result.address}\nnext: covpool predict {latest} photos"


push = Command(
    PushArguments,
    "covpool push runs/birds/bundle ann/birds --license apache-2.0 --results runs/birds/evaluation",
    run_push,
    text_of_push,
)


@dataclass(frozen=True)
class ConvertArguments:
    """Convert a checkpoint of fast-MPN-COV, the code of the paper's authors, into a bundle.

    It detects architecture, number of classes and dimension from the file.

    Attributes:
        file: checkpoint, ``.pth`` or ``.pth.tar``: a released one, or one written in training.
        folder: folder for the bundle.
        steps: Newton-Schulz iterations of the network, which the file does not contain.
        classes: text file with a class name on each line, in the order of the logits.
    """

    file: Path
    folder: Path
    steps: int = 5
    classes: Path | None = None


@dataclass(frozen=True)
class Converted:
    """The detected network, and its folder."""

    backbone: str
    dim: int | None
    steps: int
    num_classes: int
    parameters: int
    folder: str


def run_convert(arguments: ConvertArguments) -> Converted:
    """Convert and save."""
    from covpool.models.convert import convert_checkpoint
    from covpool.models.saving import save_model

    # Read first, so that an error in it does not wait for the checkpoint.
    classes = None if arguments.classes is None else class_names(arguments.classes)
    model = convert_checkpoint(arguments.file, steps=arguments.steps)
    save_model(model, arguments.folder, classes=classes)
    return Converted(
        backbone=model.config.backbone,
        dim=model.config.dim if isinstance(model.config.dim, int) else None,
        steps=arguments.steps,
        num_classes=model.num_classes,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        folder=str(arguments.folder),
    )


def text_of_convert(result: Converted) -> str:
    """Return two lines."""
    from covpool.terminal import human

    channels = "all" if result.dim is None else str(result.dim)
    return (
        f"{result.backbone}, iSQRT-COV of {channels} channels in {result.steps} steps, "
        f"{result.num_classes:,} classes, {human(result.parameters)} parameters\n"
        f"saved in {result.folder}: covpool.load_model({result.folder!r})"
    )


convert = Command(
    ConvertArguments, "covpool convert vgg.pth.tar runs/paper/bundle", run_convert, text_of_convert
)
