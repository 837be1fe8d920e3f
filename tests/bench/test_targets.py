from __future__ import annotations

import pytest

from covpool.bench import CONTENDERS, SIZES, TARGETS
from covpool.bench.targets import Target

SIZE = {
    "contenders": {
        "rival": {
            "value_and_gradient": {"ratio": {"median": 0.8, "q1": 0.5, "q3": 1.0}},
            "bytes_kept_per_image": 3 * 2**19,
        }
    }
}


def test_targets_name_sizes_and_contenders_that_exist() -> None:
    for target in TARGETS:
        assert target.size in SIZES
        assert target.contender in CONTENDERS


@pytest.mark.parametrize(
    ("quantity", "measured", "reached", "missed"),
    [
        ("speedup", (0.8, 0.5, 1.0), 0.8, 0.9),
        ("cost", (0.8, 0.5, 1.0), 0.8, 0.7),
        ("overhead", (1.25, 1.0, 2.0), 1.25, 1.2),
        ("memory", (1.5, 1.5, 1.5), 1.5, 1.4),
    ],
)
def test_figures_and_verdicts(quantity, measured, reached: float, missed: float) -> None:
    target = Target("14x14", quantity, "rival", reached)
    assert target.measured(SIZE) == pytest.approx(measured)
    assert target.met(measured[0])
    assert not Target("14x14", quantity, "rival", missed).met(measured[0])
    assert Target("14x14", quantity, "rival", missed).met(measured[0], margin=0.2)


def test_a_contender_left_out_has_no_figure() -> None:
    assert Target("14x14", "speedup", "absent", 1.0).measured(SIZE) is None
