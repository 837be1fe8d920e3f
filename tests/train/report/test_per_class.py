"""The table of classes against scikit-learn."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from covpool.data.image_set import ENCODING, ERRORS
from covpool.train.report.per_class import HEADER, errors_by_pair, per_class, per_class_csv
from covpool.train.report.record import Predictions, read_run
from tests.train.report.runs import invented, write_run


@pytest.fixture
def predictions(tmp_path: Path) -> Predictions:
    """Of 30 classes, three of which have no images, and one of these is what nothing is taken for."""
    images = [(name, label) for name, label in invented(30, 12) if label not in (3, 28, 29)]
    classes = [f"class {number}" for number in range(30)]
    found = read_run(write_run(tmp_path, classes, images, accuracy=0.6)).predictions
    found.predicted[found.predicted == 29] = 28
    return found


def test_figures_are_those_of_scikit_learn(predictions: Predictions) -> None:
    rows = per_class(predictions)
    expected = precision_recall_fscore_support(
        predictions.labels, predictions.predicted, labels=np.arange(30), zero_division=np.nan
    )
    for column, name in zip(expected, ("precision", "recall", "f1", "images"), strict=True):
        np.testing.assert_allclose([getattr(row, name) for row in rows], column, rtol=1e-12)
    assert [row.name for row in rows] == list(predictions.classes)
    assert np.isnan([rows[29].precision, rows[29].recall, rows[29].f1]).all()


def test_most_confused_with(predictions: Predictions) -> None:
    table = confusion_matrix(predictions.labels, predictions.predicted, labels=np.arange(30))
    np.fill_diagonal(table, 0)
    for row, counts in zip(per_class(predictions), table, strict=True):
        assert row.times == counts.max()
        expected = predictions.classes[counts.argmax()] if counts.any() else ""
        assert row.confused_with == expected


def test_errors_are_counted_once(predictions: Predictions) -> None:
    table = confusion_matrix(predictions.labels, predictions.predicted, labels=np.arange(30))
    np.fill_diagonal(table, 0)
    errors = errors_by_pair(predictions)
    assert (np.diff(errors.times) <= 0).all()
    assert (table[errors.labels, errors.predicted] == errors.times).all()
    assert errors.times.sum() == table.sum() == (~predictions.right).sum()


def test_the_file(predictions: Predictions, tmp_path: Path) -> None:
    rows = per_class(predictions)
    rows[0] = rows[0]._replace(name='a "b", c\nd', confused_with="\udcff鳥")
    (tmp_path / "per_class.csv").write_bytes(per_class_csv(rows))
    with (tmp_path / "per_class.csv").open(encoding=ENCODING, errors=ERRORS, newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == HEADER
    assert (lines[0][0], lines[0][5]) == ('a "b", c\nd', "\udcff鳥")
    assert lines[29] == ["class 29", "0", "", "", "", "", "0"]
    for line, row in zip(lines, rows, strict=True):
        assert float(line[3] or "nan") == pytest.approx(row.recall, rel=1e-5, nan_ok=True)
