"""Training at full size: commands, hours and the errors to expect."""

from __future__ import annotations

import functools
import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from covpool.models.plan import plan
from covpool.training.recipe_files import read_recipe

IMAGES = 1_281_167
CLASSES = 1000
GPUS = 8
# bfloat16 products of an A100, and the share that convolutional networks reach, see docs/scale.md.
PEAK, SHARE = 312e12, 0.1
# Images/s that a core decodes, measured by experiments/bulk.py, and cores per GPU.
DECODED, WORKERS = 205.7, 12


@dataclass(frozen=True)
class FullSize:
    """A row of the paper.

    Attributes:
        row: name of the row.
        recipe: name of the recipe.
        expected: top-1 and top-5 error, or a statement of the paper.
        changes: changes to the recipe, by key.
    """

    row: str
    recipe: str
    expected: str
    changes: dict[str, Any] = field(default_factory=dict)

    def command(self) -> str:
        """Return the command for one machine with eight GPUs."""
        words = ["torchrun", "--nproc-per-node", str(GPUS), "-m", "covpool", "train", "--recipe", self.recipe]
        words += ["--data", "imagenet", "--precision", "bfloat16", "--workers", str(WORKERS)]
        for key, value in self.changes.items():
            words += [f"--{key.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
        return shlex.join(words)

    @functools.cached_property
    def gigaflops(self) -> float:
        """Return the GFLOP per image, forward and backward."""
        recipe = read_recipe(self.recipe, {"model.num_classes": CLASSES, **_as_keys(self.changes)})
        total = plan(recipe.model, batch_size=2).total  # BatchNorm in a hidden layer needs two images
        return (total.forward_flops + total.backward_flops) / 2 / 1e9

    def epochs(self) -> int:
        """Return the number of epochs in the recipe."""
        return read_recipe(self.recipe).schedule.epochs

    def images_per_second(self) -> float:
        """Return the rate at which the GPUs compute or the cores decode, whichever is lower."""
        return min(GPUS * PEAK * SHARE / (self.gigaflops * 1e9), GPUS * WORKERS * DECODED)

    def hours(self) -> float:
        """Return the hours of training."""
        return IMAGES * self.epochs() / self.images_per_second() / 3600


ROWS = (
    *(
        FullSize(
            f"Figure 2, N={steps}",
            "alexnet-imagenet",
            claim,
            {"model.pool_options": {"iteration": "paper", "steps": steps}},
        )
        for steps, claim in (
            (1, "1.3 points below Plain-COV"),
            (3, "38.8"),
            (7, "same as N=5"),
            (9, "above N=7"),
        )
    ),
    FullSize("Figure 2, Plain-COV", "alexnet-imagenet", "1.3 points above N=1", {"pool": "cov"}),
    FullSize("Figure 2 and Table 3, MPN-COV", "alexnet-imagenet", "38.51 / 17.60", {"pool": "mpn_cov"}),
    FullSize("Table 3, AlexNet", "alexnet-imagenet", "41.8 / 19.2", {"pool": "gap"}),
    FullSize("Table 3, B-CNN", "alexnet-imagenet", "39.89 / 18.32", {"pool": "bcnn"}),
    FullSize("Table 3, DeepO2P", "alexnet-imagenet", "42.16 / 19.62", {"pool": "deep_o2p"}),
    FullSize("Table 3, improved B-CNN", "alexnet-imagenet", "40.75 / 18.91", {"pool": "improved_bcnn"}),
    FullSize("Table 3, G2DeNet", "alexnet-imagenet", "38.71 / 17.66", {"pool": "g2denet"}),
    FullSize("Table 3, iSQRT-COV (Frobenius)", "alexnet-imagenet-frobenius", "38.78 / 17.67"),
    FullSize("Figure 2, N=5; Table 3, iSQRT-COV (trace)", "alexnet-imagenet", "38.45 / 17.52"),
    FullSize("Table 4, without compensation", "resnet50-imagenet-uncompensated", "does not converge"),
    FullSize("Table 4, BatchNorm instead of compensation", "resnet50-imagenet-batchnorm", "23.12 / 6.60"),
    FullSize("Tables 4, 5, 6, ResNet-50, d=256", "resnet50-imagenet", "22.14 / 6.22"),
    FullSize("Figure 4, 90 epochs", "resnet50-imagenet-90", "top-5 6.12"),
    FullSize("Figure 4 and Table 5, MPN-COV", "resnet50-imagenet-90", "22.73 / 6.54", {"pool": "mpn_cov"}),
    FullSize("Tables 5 and 6, ResNet-50", "resnet50-imagenet", "24.7 / 7.8 (He et al.)", {"pool": "gap"}),
    FullSize("Table 5, ResNet-101", "resnet101-imagenet", "21.21 / 5.68"),
    FullSize(
        "Table 5, ResNet-101, first order", "resnet101-imagenet", "23.6 / 7.1 (He et al.)", {"pool": "gap"}
    ),
    FullSize("Table 6, d=128", "resnet50-imagenet-d128", "22.78 / 6.43"),
    FullSize("Table 6, d=64", "resnet50-imagenet-d64", "23.73 / 6.99"),
    FullSize("VGG-D, before Table 7", "vgg-d-imagenet", "not in the paper; 23.98 / 7.12 (the authors' code)"),
)


def full_size_lines() -> list[str]:
    """Return the section of the page as lines of Markdown."""
    lines = [
        f"This table estimates the time to train networks of the paper on ImageNet with {GPUS} A100 "
        "GPUs. The estimate was not checked on a GPU. The errors are those of the paper, "
        "if the row names no other source.",
        "",
        f"- Hours = {IMAGES:,} images × epochs / (images/s) / 3600.",
        "- images/s is the smaller of two rates: that of the GPUs, and that at which the CPU cores decode "
        "images.",
        f"- The GPUs compute {GPUS} × {PEAK / 1e12:.0f} TFLOP/s × {SHARE:.0%} / FLOP per image. The "
        f"bfloat16 peak of an A100 is {PEAK / 1e12:.0f} TFLOP/s, and {SHARE:.0%} is typical of convolutional "
        "networks.",
        f"- {GPUS * WORKERS} cores decode {DECODED} images/s each.",
        "- `covpool plan` counts the FLOP of forward and backward passes. Eigendecompositions take longer "
        "on a GPU than their FLOP suggest.",
        "",
        "| in the paper | epochs | GFLOP per image | images/s | hours | the paper's top-1 / top-5 error, % |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        cells = [row.row, str(row.epochs()), f"{row.gigaflops:.1f}", f"{row.images_per_second():,.0f}"]
        lines.append(f"| {' | '.join([*cells, f'{row.hours():.1f}', row.expected])} |")
    return [
        *lines,
        "",
        "The commands of these rows, in the same order:",
        "",
        "```sh",
        *(f"{row.command()}  # {row.row}" for row in ROWS),
        "```",
    ]


def _as_keys(changes: dict[str, Any]) -> dict[str, Any]:
    """Replace ``pool``, which is short for ``model.pool`` on a command line."""
    return {"model.pool" if key == "pool" else key: value for key, value in changes.items()}
