"""The loss over the learning rate, from ``covpool lr-find``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from covpool.drawing.theme import Theme, dress, new_figure

if TYPE_CHECKING:
    from covpool.train.lr_find import Sweep


def draw_sweep(sweep: Sweep, theme: Theme) -> Figure:
    """Single losses, the smoothed loss, and the rate that is suggested."""
    figure = new_figure(theme, 6.4, 4.0)
    axes = figure.subplots()
    dress(axes, theme)
    axes.plot(sweep.rates, sweep.losses, color=theme.series[0], linewidth=0.8, alpha=0.35)
    axes.plot(sweep.rates, sweep.smoothed, color=theme.series[0], linewidth=1.8, label="smoothed loss")
    if sweep.suggestion is not None:
        label = f"falls fastest: {sweep.suggestion:.2g}"
        axes.axvline(
            sweep.suggestion, color=theme.series[1], linewidth=1.4, linestyle=(0, (3, 2)), label=label
        )
    axes.set_xscale("log")
    axes.set_title("Loss", loc="left", fontsize=11, color=theme.ink)
    axes.set_xlabel("learning rate", fontsize=9, color=theme.faint)
    # What comes after the explosion would press all before it into a line.
    before = sweep.losses[: sweep.smoothed.argmin() + 1]
    low, high = min(before.min(), sweep.smoothed.min()), before.max()
    margin = 0.1 * (high - low) or 0.1 * high
    axes.set_ylim(low - margin, high + 3 * margin)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
    return figure
