"""``covpool convert``: see :func:`covpool.models.convert.convert_checkpoint`."""

from dataclasses import dataclass
from pathlib import Path

from covpool.cli.shard import class_names

EXAMPLE = "covpool convert vgg.pth.tar runs/paper/bundle"


@dataclass(frozen=True)
class Arguments:
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


def run(arguments: Arguments) -> Converted:
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


def text(result: Converted) -> str:
    """Return two lines."""
    from covpool.terminal import human

    channels = "all" if result.dim is None else str(result.dim)
    return (
        f"{result.backbone}, iSQRT-COV of {channels} channels in {result.steps} steps, "
        f"{result.num_classes:,} classes, {human(result.parameters)} parameters\n"
        f"saved in {result.folder}: covpool.load_model({result.folder!r})"
    )
