"""The table and the page of ``covpool fit``, and the commands to type next."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covpool.closed_form.labels import FILE as LABELS
from covpool.closed_form.labels import Suspects
from covpool.closed_form.options import FitOptions
from covpool.data.image_set import ImageSet
from covpool.evaluate.probe.record import difference
from covpool.models.bundle import load_model
from covpool.models.card import versions
from covpool.provenance import machine_name
from covpool.storage.files import replace_file
from covpool.terminal import counted, duration
from covpool.training.report import PAGE, SPLITS, environment, next_commands, prediction_values
from covpool.training.report.rendering import looks, render


def write_page(
    folder: Path,
    record: dict[str, Any],
    predictions: Any,
    images: ImageSet,
    suspects: Suspects | None,
    *,
    is_tuned: bool,
) -> None:
    """Write ``report.html``."""
    model = load_model(folder / "bundle")
    data = record["arguments"]["data"]
    name = Path(data.rstrip("/")).name or data
    page = render(
        "fit.html.jinja",
        title=f"{name} · {record['model']} · {record['best']}{', fine-tuned' if is_tuned else ''}",
        record=record,
        split=SPLITS.get(record["split"], ""),
        found=prediction_values(folder, predictions, images),
        table=table_cells(record),
        over=next((head["over_gap"] for head in record["heads"] if head["head"] == record["best"]), None),
        # In cross-validation other classifiers made the predictions.
        looks=looks(predictions, images, model) if record["split"] in SPLITS else [],
        commands=commands(data, folder, record),
        suspects=[] if suspects is None else suspects.tiles(),
        correct=correction(folder, record),
        facts=[
            ("Network", record["model"]),
            ("Images", ", ".join(f"{SPLITS[split]} {n:,}" for split, n in record["images"].items())),
            ("Classes", f"{len(images.classes):,}"),
            *environment({**record, "machine": machine_name(record["machine"]), "versions": versions()}),
        ],
    )
    replace_file(folder / PAGE, page)


def table_cells(record: dict[str, Any]) -> list[list[str]]:
    """Return titles, and a row for each head and for fine-tuning."""
    rows = [["head", "classifier", "top-1 in %", "over gap (95 % interval)"]]
    for head in record["heads"]:
        solver = head["solver"] if head["seeds"] is None else f"trained, {counted(head['seeds'], 'seed')}"
        rows.append([head["head"], solver, f"{100 * head['top1']:.1f}", difference(head["over_gap"])])
    if tuned := record["finetuned"]:
        rows.append([f"{tuned['head']}, fine-tuned", "trained", f"{100 * tuned['top1']:.1f}", ""])
    return rows


def commands(data: str, folder: Path, record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the commands to type next, each with its purpose."""
    lines = next_commands(folder, data)
    if record["finetuned"] is None:
        purpose = f"fine-tune the whole network, about {duration(record['finetune_seconds'])} on this machine"
        words = ["covpool", "fit", data, "--out", str(folder), *_given(record["arguments"]), "--finetune"]
        lines.append((purpose, shlex.join(words)))
    return lines


def correction(folder: Path, record: dict[str, Any]) -> str:
    """Return the command that fits again to corrected labels; empty if there is no table of labels."""
    if not (folder / LABELS).exists():
        return ""
    out = folder.with_name(f"{folder.name}-corrected")
    words = ["covpool", "fit", str(folder / LABELS), "--trust-rows", "--out", str(out)]
    return shlex.join([*words, *_given(record["arguments"])])


def _given(arguments: dict[str, Any]) -> list[str]:
    """Return the options that differ from their defaults, as words of a command line."""
    words = []
    for name, default in asdict(FitOptions()).items():
        value = tuple(arguments[name]) if name == "heads" else arguments[name]  # a list in results.json
        if value != default and name not in ("finetune", "device", "workers"):
            words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else _word(value)]
    return words


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, list | tuple) else json.dumps(value)
