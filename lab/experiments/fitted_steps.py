"""Fit the coefficients of Newton-Schulz steps, and draw their errors.

    python -m lab fitted_steps            # measure
    python -m lab figures fitted_steps    # draw the results

K steps turn an eigenvalue λ of the normalized covariance into ``y_K(λ)``:

    w_0 = λ,  y_0 = λ,  T_k = a_k + b_k w_k,  y_{k+1} = y_k T_k,  w_{k+1} = w_k T_k² .

Each fit minimizes the largest relative error ``|y_K(λ)/f(λ) − 1|`` over an interval [low, 1]. The targets f
are 5 and 7 steps of the paper, and the exact root.

A factor can move from one step to the next without a change of ``y_K``. The fit uses this freedom to make the
largest ``w_k`` on [0, 1] equal to 1 for every k, so no iterate grows. With ``T_k = a_k (1 − c_k w_k)`` and
``0 < c_k < 1``, every T_k is positive definite, and K values c remain to fit. The factor of the last step
centers the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from covpool.drawing import LIGHT, dress, new_figure, png
from covpool.functional.newton_schulz import Coefficients, paper_steps
from covpool.storage.files import replace_file
from lab.record import ROOT, committed_file, new_record, read_record, record_file, write_record

PICTURE = ROOT / "docs" / "images" / "fitted_steps.png"
Values = NDArray[np.float64]

SEED = 0
STARTS = 24
GRID = 1000  # number of eigenvalues in a fit; errors are reported on ten times this number
DIGITS = 6


class Fit(NamedTuple):
    """A function to approximate on [low, 1], and the number of steps."""

    target: str
    steps: int
    low: float

    @property
    def label(self) -> str:
        """Return a label such as ``5 paper steps by 3``."""
        return f"{self.target} by {self.steps}"


TARGETS: dict[str, Callable[[Values], Values]] = {
    "5 paper steps": lambda x: values(x, paper_steps(5)),
    "7 paper steps": lambda x: values(x, paper_steps(7)),
    "exact root": np.sqrt,
}
FITS = (
    Fit("5 paper steps", 3, 1e-5),
    Fit("5 paper steps", 4, 1e-5),
    Fit("7 paper steps", 4, 1e-5),
    Fit("7 paper steps", 5, 1e-5),
    Fit("exact root", 3, 1e-3),
    Fit("exact root", 4, 1e-3),
    Fit("exact root", 5, 1e-3),
)


def values(x: Values, coefficients: Coefficients) -> Values:
    """Return ``y_K`` of eigenvalues x."""
    y, w = x, x
    for a, b in coefficients:
        t = a + b * w
        y, w = y * t, w * t * t
    return y


def error(fit: Fit, coefficients: Coefficients) -> float:
    """Return the largest relative error on the interval of the fit."""
    x = np.geomspace(fit.low, 1.0, 10 * GRID + 1)
    return float(np.abs(values(x, coefficients) / TARGETS[fit.target](x) - 1).max())


def fitted(fit: Fit, starts: Sequence[Sequence[float]] | None = None) -> Coefficients:
    """Return the best coefficients from several starts ``c_0 .. c_{K-1}``; random ones if none are given."""
    if starts is None:
        starts = np.random.default_rng(SEED).uniform(0.1, 0.95, (STARTS, fit.steps)).tolist()
    x = np.geomspace(fit.low, 1.0, GRID)
    log_target = np.log(TARGETS[fit.target](x))
    candidates = [_descended(np.asarray(start), x, log_target) for start in starts]
    best = min(candidates, key=lambda c: _spread(c, x, log_target))
    return _coefficients(best, _log_ratio(best, x, log_target))


def shape(coefficients: Coefficients) -> list[float]:
    """Return ``c_k`` of given coefficients, a start near them."""
    scale, shapes = 1.0, []
    for a, b in coefficients:
        shapes.append(-b / a * scale)
        scale *= a * a * _largest(shapes[-1])
    return shapes


def _log_ratio(c: Values, x: Values, log_target: Values) -> Values:
    """Return ``log(y_K / f)`` up to a constant."""
    w, log_y = x, np.log(x) - log_target
    for c_k in c:
        t = 1 - c_k * w
        log_y, w = log_y + np.log(t), w * t * t / _largest(c_k)
    return log_y


def _largest(c: float) -> float:
    """Return the largest ``w (1 − c w)²`` for w in [0, 1]."""
    return 4 / (27 * c) if c > 1 / 3 else (1 - c) ** 2


def _spread(c: Values, x: Values, log_target: Values) -> float:
    if c.min() <= 0 or c.max() >= 1:
        return math.inf
    return float(np.ptp(_log_ratio(c, x, log_target)))


def _descended(start: Values, x: Values, log_target: Values) -> Values:
    """Minimize the spread by Nelder-Mead, then its smooth form: the least t with ``|log ratio + s| <= t``."""
    steps, options = len(start), {"maxiter": 400 * len(start), "xatol": 1e-7, "fatol": 1e-10}
    near: Values = minimize(_spread, start, args=(x, log_target), method="Nelder-Mead", options=options).x
    ratio = _log_ratio(near, x, log_target)
    first = [*near, -(ratio.max() + ratio.min()) / 2, np.ptp(ratio) / 2]

    def slack(v: Values) -> Values:
        shifted = _log_ratio(v[:steps], x, log_target) + v[steps]
        return np.concatenate([v[-1] - shifted, v[-1] + shifted])

    end: Values = minimize(
        lambda v: v[-1],
        first,
        method="SLSQP",
        bounds=[(1e-3, 0.999)] * steps + [(None, None)] * 2,
        constraints={"type": "ineq", "fun": slack},
        options={"maxiter": 200, "ftol": 1e-14},
    ).x[:steps]
    return min(near, end, key=lambda c: _spread(c, x, log_target))


def _coefficients(c: Values, log_ratio: Values) -> Coefficients:
    """Return a and b of every step, rounded; the last step has the factor that centers the error."""
    factors = [_largest(c_k) ** -0.5 for c_k in c[:-1]]
    high, low = np.exp(log_ratio.max()), np.exp(log_ratio.min())
    # The ratio includes the factors of earlier steps only in w, not in y.
    factors.append(2 / (high + low) / math.prod(factors))
    return tuple(
        (round(float(a), DIGITS), round(float(-c_k * a), DIGITS)) for a, c_k in zip(factors, c, strict=True)
    )


def run() -> dict[str, Any]:
    """Compute all fits."""
    fits = []
    for fit in FITS:
        coefficients = fitted(fit)
        fits.append(
            {
                **fit._asdict(),
                "coefficients": coefficients,
                "error": float(f"{error(fit, coefficients):.4g}"),
                "error_of_paper_steps": float(f"{error(fit, paper_steps(fit.steps)):.4g}"),
            }
        )
    return {
        **new_record("fitted_steps", ("functional", "lab/experiments"), seed=SEED),
        "starts": STARTS,
        "fits": fits,
    }


def table(results: dict[str, Any]) -> str:
    """Return the fits as Markdown."""
    titles = [
        "target",
        "eigenvalues",
        "steps",
        "products",
        "error",
        "error of the same number of paper steps",
        "(a, b) of each step",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for fit in results["fits"]:
        steps = fit["steps"]
        pairs = " ".join(f"({a:g}, {b:g})" for a, b in fit["coefficients"])
        cells = [
            fit["target"],
            f"{fit['low']:g} to 1",
            f"{steps}",
            f"{3 * steps - 3} + {4 * steps - 4}",
            f"{100 * fit['error']:.2g} %",
            f"{100 * fit['error_of_paper_steps']:.2g} %",
            pairs,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the map of 3 steps on the left, and the error of every fit on the right."""
    figure = new_figure(LIGHT, 13, 4.6)
    left, *panels = figure.subplots(1, 4, width_ratios=[1.5, 1, 1, 1])
    colors = {3: LIGHT.series[1], 4: LIGHT.series[0], 5: "#1b7f4d"}
    x = np.geomspace(1e-5, 1, 2000)
    fits = {(fit["target"], fit["steps"]): fit for fit in results["fits"]}
    three = fits["5 paper steps", 3]["coefficients"]
    left.loglog(x, np.sqrt(x), color=LIGHT.faint, lw=1, ls=":", label="exact root")
    left.loglog(x, values(x, paper_steps(5)), color=LIGHT.ink, lw=3, alpha=0.35, label="5 paper steps")
    left.loglog(x, values(x, three), color=colors[3], lw=1.3, label="3 fitted steps")
    left.loglog(x, values(x, paper_steps(3)), color=colors[3], lw=1.3, ls="--", label="3 paper steps")
    left.set_title("Eigenvalues out", fontsize=10, loc="left")
    left.set_ylabel("eigenvalue out")
    left.legend(frameon=False, fontsize=8.5)
    for panel, (name, target) in zip(panels, TARGETS.items(), strict=True):
        for (of, steps), fit in fits.items():
            if of == name:
                inside = x[x >= fit["low"]]
                off = 100 * np.abs(values(inside, fit["coefficients"]) / target(inside) - 1)
                panel.loglog(inside, off, color=colors[steps], lw=1.2, label=f"{steps} steps")
        panel.set_ylim(1e-3, 100)
        panel.set_title(f"Error against {name} (%)", fontsize=10, loc="left")
        panel.legend(frameon=False, fontsize=8.5, loc="lower left")
    for axes in (left, *panels):
        dress(axes, LIGHT)
        axes.set_xlabel("eigenvalue in")
        axes.set_xlim(1e-5, 1)
    replace_file(path, png(figure))


def main(file: Path | None = None) -> None:
    """Fit the coefficients of Newton-Schulz steps, and measure their errors.

    Args:
        file: results file; by default that of this machine in results/.
    """
    results = run()
    write_record(file or record_file(results), results, table(results))
    print(table(results))


def write_pages(file: Path | None = None, picture: Path = PICTURE) -> list[Path]:
    """Draw docs/images/fitted_steps.png.

    Args:
        file: results of ``python -m lab fitted_steps``; the committed ones if not given.
        picture: file of the picture.
    """
    draw(read_record(file or committed_file("fitted_steps")), picture)
    return [picture]
