from __future__ import annotations

import io
import math
from dataclasses import asdict

import pytest
from PIL import Image

from covpool.drawing import LIGHT, png
from covpool.evaluate.accuracy import calibrate
from covpool.evaluate.figures import SHOWN, draw_classes, draw_reliability
from covpool.training.report.record import ClassRow
from tests.evaluate.accuracy.made import made_logits, predictions_of


def size_of(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.size


def test_reliability_shows_the_bins() -> None:
    calibration = asdict(calibrate(predictions_of(*made_logits(200, 3))))
    metrics = {
        f"{name}_calibration_error": calibration.pop(f"{name}_error") for name in ("expected", "maximum")
    }
    figure = draw_reliability(metrics, calibration, LIGHT)
    above, below = figure.axes
    assert [bar.get_height() for bar in above.patches] == [
        v for v in calibration["accuracy"] if v is not None
    ]
    assert [bar.get_height() for bar in below.patches] == list(calibration["images"])
    assert f"expected {100 * metrics['expected_calibration_error']:.1f} %" in above.get_title(loc="left")
    assert size_of(png(figure)) == (720, 840)


def row(number: int, recall: float, images: int = 20) -> ClassRow:
    return ClassRow(f"class {number}", images, 0.5, recall, 0.5, "", 0)


def test_the_hardest_classes_come_first() -> None:
    rows = [row(number, (number * 7 % 50) / 50, 50) for number in range(50)] + [row(50, math.nan, 0)]
    (axes,) = draw_classes(rows, LIGHT).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) == SHOWN
    assert names[:2] == ["class 0  (50)", "class 43  (50)"]
    assert axes.get_ylabel() == "the 40 hardest of 50 classes"
    recall, precision = (line.get_xdata() for line in axes.get_lines())
    assert list(recall) == pytest.approx([2.0 * place for place in range(SHOWN)])
    assert len(precision) == SHOWN


def test_a_class_that_nothing_was_taken_for_has_no_precision() -> None:
    rows = [ClassRow("$odd_", 3, math.nan, 0.0, 0.0, "", 0), ClassRow("鳥", 1, math.nan, 0.0, 0.0, "", 0)]
    figure = draw_classes(rows, LIGHT)
    _, precision = figure.axes[0].get_lines()
    assert all(math.isnan(value) for value in precision.get_xdata())
    assert size_of(png(figure))[0] == 1080
