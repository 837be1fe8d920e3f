"""Write the row of ``isqrt_cov`` for the public board of Efficient Probing: see ``lab/board.md``.

    python -m lab board IMAGENET OUT --model vit_base_patch16_dinov3 --method DINOv3 --arch ViT-B/16

The head is solved in closed form from one pass over the training images, and measured on ``val``.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import covpool
from covpool.arguments import Device
from covpool.closed_form.options import FitOptions
from covpool.data.sources import open_splits
from covpool.errors import UsageError
from covpool.models.bundle import load_model
from covpool.storage.files import read_text, replace_file
from covpool.storage.folders import make_folder
from covpool.terminal import NamedProgress, counted, duration

# The columns of the board that a new row must have, and the two that this row adds.
COLUMNS = ("family", "method", "arch", "pretrain", "eval", "image_size", "lp", "lp_gap", "ep")
ADDED = ("isqrt_cov", "isqrt_cov_log")


class Name(NamedTuple):
    """What the board says of a backbone."""

    family: str
    method: str
    arch: str
    pretrain: str

    @property
    def folder(self) -> str:
        """The folder of its logs."""
        words = f"{self.method} {self.arch}".lower()
        return "".join(letter if letter.isalnum() else "_" for letter in words)


def log_of(record: Mapping[str, Any], head: Mapping[str, Any], parameters: int, seconds: float) -> str:
    """Return the log of a head, in the form of the board's logs."""
    return "\n".join(
        [
            "Training Log",
            f"Model: {record['model']}",
            f"Dataset: {record['arguments']['data']}",
            f"Representation: {head['head']}",
            f"Solution: {head['solver']}, strength {head['strength']:g}, one pass, no epochs",
            f"Held-out Training Images: {head['held_out']:.2%}",
            f"Classifier Parameters: {parameters:,}",
            f"covpool: {record['versions']['covpool']}, commit {record['source']['commit']}",
            "",
            "Final Results:",
            f"Max Accuracy: {100 * head['top1']:.2f}%",
            f"Total Time: {duration(seconds)}",
            "",
        ]
    )


def row_of(
    name: Name, size: int, data: str, linear: Mapping[str, Any], ours: Mapping[str, Any], board: str | None
) -> dict[str, str]:
    """Return the row: that of the board if it has this backbone, else a new one, with two more columns."""
    held = [row for row in csv.DictReader(io.StringIO(board or "")) if is_of(row, name, size)]
    row = held[0] if held else dict.fromkeys(COLUMNS, "") | name._asdict()
    if not held:
        is_gap = "yes" if linear["head"] == "gap" else "no"
        row |= {"eval": data, "image_size": str(size), "lp": f"{100 * linear['top1']:.2f}", "lp_gap": is_gap}
    return row | {ADDED[0]: f"{100 * ours['top1']:.2f}", ADDED[1]: f"logs/{name.folder}/isqrt_cov.txt"}


def is_of(row: Mapping[str, str], name: Name, size: int) -> bool:
    """Return whether a row of the board is of this backbone."""
    return (row["method"], row["arch"], row["image_size"]) == (name.method, name.arch, str(size))


def main(
    data: Path,
    out: Path,
    model: str,
    method: str,
    arch: str,
    family: str = "",
    pretrain: str = "",
    lp: Literal["cls", "gap"] = "cls",
    dim: int = 128,
    evaluated_on: str = "IN-1K",
    weights: Path | None = None,
    board: Path | None = None,
    batch_size: int = 64,
    workers: int = 2,
    compile: bool = True,
    device: Device = "auto",
) -> Path:
    """Write a line for results.csv of Efficient Probing, and the logs that it links.

    Args:
        data: images with train and val by class, such as ImageNet.
        out: folder of the fit, of results.csv and of logs; rerun the command to resume.
        model: a backbone of timm.
        method: pretraining method, as on the board.
        arch: architecture, as on the board.
        family: paradigm, as on the board.
        pretrain: images of the pretraining, as on the board.
        lp: the linear probe reads the class token or average pooling, by the board's rule.
        dim: channels that ``isqrt_cov`` pools.
        evaluated_on: name of the images, as on the board.
        weights: file with the weights of the backbone; the pretrained ones if not given.
        board: results.csv of the board; its row of this backbone gets two more columns.
        batch_size: images per batch of the backbone.
        workers: processes that read images.
        compile: compile the backbone.
        device: ``auto`` uses a GPU if there is one.
    """
    if "val" not in (splits := open_splits(str(data))) and "test" not in splits:
        raise UsageError(f"{data} has neither val nor test: the board measures on the validation images")
    options = FitOptions(
        model=model,
        weights=None if weights is None else str(weights),
        heads=(lp, "isqrt_cov"),
        dim=dim,
        batch_size=batch_size,
        workers=workers,
        compile=compile,
        device=device,
    )
    started = time.monotonic()
    with NamedProgress() as progress:
        record = covpool.fit(data, out / "fit", options, log=progress.log, progress=progress).metrics
    heads = {head["head"]: head for head in record["heads"]}
    linear, ours = heads[lp], heads["isqrt_cov"]
    size = max(load_model(out / "fit" / "bundle").pretrained_cfg["input_size"][1:])
    name = Name(family, method, arch, pretrain)
    logs = make_folder(out / "logs" / name.folder)
    for head, file in ((linear, "lp"), (ours, "isqrt_cov")):
        parameters = (head["vector"] + 1) * len(splits["train"].classes)
        text = log_of(record, head, parameters, time.monotonic() - started)
        replace_file(logs / f"{file}.txt", text.encode())
    row = row_of(name, size, evaluated_on, linear, ours, None if board is None else read_text(board))
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(row))
    writer.writeheader()
    writer.writerow(row)
    replace_file(out / "results.csv", lines.getvalue().encode())
    classes = counted(len(splits["train"].classes), "class")
    print(f"{classes}: {lp} {linear['top1']:.1%}, isqrt_cov {ours['top1']:.1%}")
    return out / "results.csv"
