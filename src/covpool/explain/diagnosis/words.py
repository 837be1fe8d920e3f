"""What a diagnosis says, in sentences: what is amiss, and what to try."""

from __future__ import annotations

import math

from covpool.explain.diagnosis.measuring import Diagnosis

# Beyond these something is said. A low rank by itself is none of it: fewer positions than channels are usual.
MANY_CONSTANT, FEW_DIRECTIONS, FAR_FROM_A_ROOT, HARDLY_ANY = 0.1, 2.0, 0.5, 1e-7


def warnings(found: Diagnosis) -> list[str]:
    """A sentence for each thing that is amiss; none if nothing is."""
    said = []
    if found.constant > MANY_CONSTANT:
        dim = _power_of_two(found.channels * (1 - found.constant))
        advice = (
            f"; try dim={dim}"
            if 8 <= dim < found.channels
            else ": does the network get what it was made for?"
        )
        said.append(f"{found.constant:.0%} of the channels are constant{advice}")
    if found.effective_rank < FEW_DIRECTIONS:
        said.append(
            f"{found.effective_rank:.1f} of {found.channels} directions hold nearly all of the variance: "
            "features are much the same everywhere; is it a plain image, or the wrong preprocessing?"
        )
    if found.residuals and found.residuals[-1] > FAR_FROM_A_ROOT:
        said.append(
            f"after {len(found.residuals)} steps the result is far from a root (residual "
            f"{found.residuals[-1]:.2f}); try more steps"
        )
    if found.gradient_rms < HARDLY_ANY or math.isnan(found.gradient_rms):
        said.append(
            f"the gradient at the pooling is {found.gradient_rms:.0e}: the backbone would hardly learn; is "
            'compensation="none", or is the network sure of every image?'
        )
    return said


def _power_of_two(channels: float) -> int:
    """The largest that is not above."""
    return int(2 ** math.floor(math.log2(max(channels, 1))))
