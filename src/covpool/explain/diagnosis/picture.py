"""A diagnosis as a figure: spectra before and after, and the residual of every step."""

from __future__ import annotations

from matplotlib.figure import Figure

from covpool.data.counts import counted
from covpool.drawing.theme import LIGHT, dress, new_figure
from covpool.explain.diagnosis.measuring import Diagnosis


def draw(found: Diagnosis) -> Figure:
    """Two panels; one where the method does not iterate."""
    panels = 2 if found.residuals else 1
    figure = new_figure(LIGHT, 3.8 * panels, 3.2)
    left, *rest = figure.subplots(1, panels, squeeze=False)[0]
    dress(left, LIGHT)
    for values, colour, name in (
        (found.spectrum, LIGHT.series[0], "covariance"),
        (found.spectrum_after, LIGHT.series[1], f"after {found.method}"),
    ):
        positive = [value for value in values if value > 1e-12]
        if positive:
            left.plot(range(1, len(positive) + 1), positive, color=colour, linewidth=1.6, label=name)
    left.set_yscale("log")
    left.set_xlabel("eigenvalue, largest first", fontsize=9)
    left.set_ylabel("share of their sum", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    for right in rest:
        dress(right, LIGHT)
        right.plot(range(1, len(found.residuals) + 1), found.residuals, "o-", color=LIGHT.series[0])
        right.set_yscale("log")
        right.set_xticks(range(1, len(found.residuals) + 1))
        right.set_xlabel("Newton-Schulz steps", fontsize=9)
        right.set_ylabel("‖Y² − A‖ / ‖A‖", fontsize=9)
    figure.suptitle(
        f"{found.channels} channels, {found.positions} positions, {counted(found.images, 'image')}",
        fontsize=10,
    )
    return figure
