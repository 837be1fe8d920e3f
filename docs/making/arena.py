"""Write the tables of heads in docs/benchmarks.md from the results: ``python -m docs.making.arena``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from covpool.evaluate.probe.record import difference, percent
from covpool.provenance.machine import release
from covpool.provenance.origin import results_file
from experiments.arena import CONTEST, case_named

PAGE = Path(__file__).parents[1] / "benchmarks.md"
RESULTS = PAGE.parents[1] / "results" / release()
PART = re.compile(r"(<!-- arena:begin -->\n).*?(<!-- arena:end -->)", flags=re.DOTALL)


def tables() -> str:
    """Return a table of the contest per data set and backbone, the most accurate head first."""
    file = results_file(RESULTS, "arena")
    assert file is not None
    return "\n\n".join(table(case) for case in json.loads(file.read_bytes())["cases"])


def table(case: dict[str, Any]) -> str:
    """Return the table of one data set with one backbone."""
    described = case_named(case["case"])
    heads = [one for one in case["heads"] if one["head"] in CONTEST]
    best = case["best_attentive"]
    titles = ["head", "top-1 accuracy", "over gap", f"over {best}" if best else "over attentive"]
    titles += ["trained parameters", "vector", "seconds"]
    lines = [
        f"**{described.title}**, {described.seeds} seeds:",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for one in sorted(heads, key=lambda one: -one["test"]["top1"]["mean"]):
        cells = [f"`{one['head']}`", percent(one["test"], "top1")]
        cells += [difference(one["over_gap"]), difference(one["over_attentive"])]
        cells += [f"{one['parameters']:,}", f"{one['vector']:,}", f"{one['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with new tables."""
    return PART.sub(lambda part: f"{part[1]}{tables()}\n{part[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
