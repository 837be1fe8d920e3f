"""Compare the pooling methods that have nothing to learn, each with its classifier in closed form.

    python -m lab fixed_methods SETS RUNS

Every set is one call of ``covpool.fit``: one pass of a frozen EfficientNet-Lite0 at 224 pixels, and d = 128
channels for every method. Rerun the command to resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covpool.evaluate.probe.record import difference, paired_difference
from lab.experiments.one_pass import Row, measured, right_shares
from lab.record import (
    ROOT,
    committed_file,
    new_record,
    read_record,
    resumable_file,
    resumed,
    with_block,
    write_record,
)

NAME = "fixed_methods"
METHODS = ("gap", "cov", "bcnn", "mpn_cov", "isqrt_cov", "correlation", "isice")
ROWS = (Row("sparrows", "lite0", 224), Row("cub", "lite0", 224))


def table(rows: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    done = [row for row in ROWS if row.name in rows]
    titles = ["method"]
    for row in done:
        name = row.title.partition(",")[0]
        titles += [f"{name}, %", f"{name}: minus `isqrt_cov` (95 % interval)"]
    lines = [
        "Top-1 accuracy in percent on test images, and its difference to that of `isqrt_cov` in percentage "
        "points, paired by image. The backbone is a frozen EfficientNet-Lite0 at 224 px. `gap` uses its "
        "1,280 channels; the other methods pool 128. The classifiers are solved in closed form "
        "(`covpool fit`).",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for method in METHODS:
        cells = [f"`{method}`"]
        for row in done:
            heads = rows[row.name]["heads"]
            ours, best = (right_shares(heads[name]["right"]) for name in (method, "isqrt_cov"))
            over = None if method == "isqrt_cov" else paired_difference(ours, best)
            cells += [f"{100 * heads[method]['top1']:.1f}", difference(over)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(sets: Path, runs: Path) -> None:
    """Fit every fixed method on every set, and write the results after each.

    Args:
        sets: folder with sparrows and cub, each with train and test by class.
        runs: folder of the fits; rerun the command to resume.
    """
    record = new_record(NAME, ("functional", "nn", "models", "data", "closed_form")) | {"rows": {}}
    file = resumable_file(record)
    record = resumed(record, file)
    for row in ROWS:
        if row.name not in record["rows"]:
            fitted = measured(row, sets, runs / f"{row.name}-methods", None, METHODS)
            record["rows"][row.name] = json.loads(json.dumps(fitted))
            write_record(file, record, table(record["rows"]))
            print(f"{row.name} is done", flush=True)


def write_pages(page: Path = ROOT / "docs" / "methods.md") -> list[Path]:
    """Write the table of the committed results into the page.

    Args:
        page: Markdown page with marks.
    """
    block = table(read_record(committed_file(NAME), NAME)["rows"])
    page.write_text(with_block(page.read_text(encoding="utf-8"), NAME, block), encoding="utf-8")
    return [page]
