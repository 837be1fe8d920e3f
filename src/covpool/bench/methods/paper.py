"""The figures that the paper prints, to stand beside ours: its Table 2, and what it says of Figure 3.

Titan Xp, CUDA 8 and Matlab 2015b; a covariance of 256 channels. Its megabytes are of 2^20 bytes: the 32,896
numbers of the result are 0.125 of them.
"""

from __future__ import annotations

from typing import NamedTuple


class PaperLayer(NamedTuple):
    """A row of Table 2(a): milliseconds an image forward and backward, forward alone, megabytes."""

    both: float
    forward: float
    memory: float | None = None


# The size of ours that the table is of: AlexNet's features.
PAPER_SIZE = "13x13"

# Table 2(a), by the label of our entry. The two of improved B-CNN without memory stand in the text.
LAYERS = {
    "isqrt_cov steps=3": PaperLayer(0.81, 0.26, 0.627),
    "isqrt_cov": PaperLayer(1.41, 0.41, 1.129),
    "mpn_cov": PaperLayer(2.58, 2.41, 0.377),
    "improved_bcnn forward=svd backward=svd": PaperLayer(13.51, 11.19, 0.501),
    "improved_bcnn forward=newton_schulz backward=lyapunov": PaperLayer(13.91, 2.09, 0.501),
    "improved_bcnn forward=newton_schulz backward=svd": PaperLayer(15.31, 2.09),
    "improved_bcnn forward=svd backward=lyapunov": PaperLayer(12.21, 11.19),
    "g2denet root=svd": PaperLayer(8.56, 4.76, 0.505),
}

# Table 2(b): milliseconds a matrix of 256×256, on what.
DECOMPOSITIONS = {
    "eigh": {"cuSOLVER": 21.3, "Matlab on the CPU": 1.8, "Matlab on the GPU": 9.8},
    "svd": {"cuSOLVER": 52.2, "Matlab on the CPU": 4.1, "Matlab on the GPU": 11.9},
}

# Figure 3 is a picture without figures. What the text says it shows:
FIGURE_3 = (
    "with one GPU, the gap between the speeds of iSQRT-COV and MPN-COV is nearly the same at every batch "
    "size; with two, it grows with the batch: iSQRT-COV's speed grows all the way, while MPN-COV's tends to "
    "saturate above 512 images"
)


def times_isqrt_cov(label: str) -> float | None:
    """The paper's time of an entry over that of iSQRT-COV with five steps; None where it has none."""
    layer = LAYERS.get(label)
    return None if layer is None else layer.both / LAYERS["isqrt_cov"].both
