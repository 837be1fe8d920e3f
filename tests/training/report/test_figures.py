"""The content of curves, confusion matrices, thumbnails and maps, also for unusual names."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix

from covpool import create_model
from covpool.data.image_set import ImageSet, Subset
from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import write_shards
from covpool.data.sources import open_images, open_splits
from covpool.drawing import DARK, LIGHT, drawn, png
from covpool.training.report import write_report
from covpool.training.report.figures import (
    SHOWN,
    _counts,
    _names,
    draw_confusion,
    draw_curves,
    draw_worst,
    shown_classes,
)
from covpool.training.report.record import Predictions, RunRecord, errors_by_pair, read_run
from covpool.training.report.rendering import EACH, SIDE, Tile, looks, most_confident_errors, tiles
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.data.trees import plant
from tests.training.report.runs import invented, labelled, write_run

ODD = (
    "$\\frac{cat$",
    "<script>",
    "鳥類",
    "a\nb\x00c",
    "\udcff",
    "",
    "_hidden",
    "العصفور",
    "x" * 5000,
    "{}%s",
)


def size_of(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.size


def run_of(folder: Path, classes: int, each: int = 10, **options: object) -> RunRecord:
    names = [f"class {number}" for number in range(classes)]
    return read_run(write_run(folder, names, invented(classes, each), **options))  # type: ignore[arg-type]


def test_curves_show_the_columns_of_the_metrics(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    figure = draw_curves({"": run}, LIGHT)
    loss, top1, rate = figure.axes
    lines = {line.get_label(): line for line in top1.get_lines()}
    np.testing.assert_allclose(lines["training"].get_ydata(), 100 * run.epochs["train_top1"])
    np.testing.assert_allclose(lines["validation"].get_ydata(), 100 * run.epochs["top1"])
    assert lines["validation"].get_xdata().tolist() == list(range(1, 13))
    assert lines["best epoch: 9"].get_xdata() == [9, 9]
    assert len(loss.get_lines()[0].get_xdata()) == 300  # reduced from 480 steps
    assert loss.get_lines()[0].get_ydata().mean() == pytest.approx(run.steps["loss"].mean(), rel=0.01)
    assert rate.get_yscale() == "linear"


def test_curves_of_one_epoch_without_validation(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3, epochs=1, split=None, validation=False)
    figure = draw_curves({"": run}, LIGHT)
    labels = [line.get_label() for line in figure.axes[1].get_lines()]
    assert labels == ["training"]
    assert figure.axes[1].get_lines()[0].get_marker() == "o"  # a single point needs a marker
    assert size_of(png(figure, 50)) == (780, 180)


def test_curves_of_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, ["a"], [], split=None)
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "log.jsonl").unlink()
    assert size_of(png(draw_curves({"": read_run(tmp_path)}, LIGHT), 50)) == (780, 180)


def test_rates_that_fall_by_steps_are_on_a_logarithmic_axis(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    run.steps["lr"][:] = np.repeat([0.1, 0.01, 0.001], 160)
    assert draw_curves({"": run}, LIGHT, ("learning rate",)).axes[0].get_yscale() == "log"


def test_curves_of_two_runs_have_a_colour_each(tmp_path: Path) -> None:
    runs = {"_$x": run_of(tmp_path / "1", 3), "鳥": run_of(tmp_path / "2", 3, seed=1)}
    axes = draw_curves(runs, DARK).axes[1]
    colours = [line.get_color() for line in axes.get_lines()]
    assert colours == [DARK.series[0]] * 2 + [DARK.series[1]] * 2
    assert len(axes.get_legend().get_texts()) == 4


@pytest.mark.parametrize("classes", [2, 10, 400])
def test_confusions_are_those_of_scikit_learn(tmp_path: Path, classes: int) -> None:
    predictions = run_of(tmp_path, classes).predictions
    errors = errors_by_pair(predictions)
    shown = shown_classes(errors, classes)
    table = confusion_matrix(predictions.labels, predictions.predicted, labels=np.arange(classes))
    counts = _counts(predictions, shown)
    assert (counts[:, : len(shown)] == table[np.ix_(shown, shown)]).all()
    assert (counts.sum(axis=1) == table.sum(axis=1)[shown]).all()  # no image is lost
    assert len(shown) == min(classes, SHOWN)
    np.fill_diagonal(table, 0)
    first = np.unravel_index(table.argmax(), table.shape)
    assert classes <= SHOWN or table[shown[0], shown[1]] == table[first]


def test_confusions_with_any_names_in_both_themes(tmp_path: Path) -> None:
    write_run(tmp_path, ODD, invented(len(ODD), 8), split=None)
    write_run(tmp_path, [f"{n}" for n in range(len(ODD))], invented(len(ODD), 8))
    predictions = read_run(tmp_path).predictions
    object.__setattr__(predictions, "classes", ODD)
    for theme in (LIGHT, DARK):
        width, height = size_of(png(draw_confusion(predictions, errors_by_pair(predictions), theme), 50))
        assert 100 < width < 1000
        assert 100 < height < 1000


def test_confusions_of_many_classes_without_an_error(tmp_path: Path) -> None:
    predictions = run_of(tmp_path, 400, 1, accuracy=2.0).predictions
    figure = draw_confusion(predictions, errors_by_pair(predictions), LIGHT)
    assert [text.get_text() for text in figure.texts] == ["no errors"]
    assert size_of(png(figure, 50))


def test_names_that_are_shortened_to_the_same_get_numbers() -> None:
    names = [f"a very long name, number {n} of many that are alike" for n in range(3)]
    assert len(set(_names([*names, "wren"], [0, 1, 2, 3]))) == 4
    assert _names([*names, "wren"], [0, 3])[1] == "wren"


def test_names_as_they_are_drawn() -> None:
    assert drawn("House_Sparrow", "", 20) == "House_Sparrow"
    assert drawn("a" * 10 + "b" * 10, "", 7) == "aaa…bbb"
    assert drawn("\U000f0000\U000f0001", "class 3", 20) == "class 3"  # private use, in no font
    assert drawn("", "class 3", 20) == "class 3"
    assert drawn("a\x1bb", "", 20) == "a□b"


def test_worst_errors_with_any_names() -> None:
    picture = Image.new("RGB", (30, 20), "red")
    tiles = [Tile(name, name, name, 0.98, picture if place % 2 else None) for place, name in enumerate(ODD)]
    figure = draw_worst(tiles, LIGHT)
    assert size_of(png(figure, 50)) == (630, 275)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("98.0 % sure") == len(ODD)
    assert texts.count("no picture") == len(ODD) // 2
    assert "is $\\frac{cat$" in texts


def test_no_errors_at_all() -> None:
    figure = draw_worst([], LIGHT)
    assert [text.get_text() for text in figure.texts] == ["no errors"]
    assert size_of(png(figure, 50))


@pytest.fixture
def sparrows() -> ImageSet:
    images = open_images(SPARROWS, "test")
    return Subset(images, np.arange(0, len(images), 12))


def predictions_of(images: ImageSet, folder: Path) -> Predictions:
    return read_run(write_run(folder, images.classes, labelled(images), accuracy=0.5)).predictions


@needs_sparrows
def test_the_most_confident_errors_are_shown(sparrows: ImageSet, tmp_path: Path) -> None:
    predictions = predictions_of(sparrows, tmp_path)
    shown = tiles(predictions, most_confident_errors(predictions, 5), sparrows)
    confidences = [tile.confidence for tile in shown]
    wrong = np.sort(predictions.confidence[~predictions.right])[::-1]
    assert confidences == wrong[:5].tolist()
    by_name = {sparrows.name(i): i for i in range(len(sparrows))}
    for tile in shown:
        assert tile.label != tile.predicted
        assert tile.label == sparrows.classes[int(sparrows.labels[by_name[tile.name]])]
        assert tile.picture is not None
        assert max(tile.picture.size) == SIDE
        assert tile.uri.startswith("data:image/jpeg;base64,/9j/")


@needs_sparrows
def test_shards_give_the_same_pictures(sparrows: ImageSet, tmp_path: Path) -> None:
    write_shards(sparrows, tmp_path / "shards")
    shards = open_shards(tmp_path / "shards")
    predictions = predictions_of(sparrows, tmp_path)
    worst = most_confident_errors(predictions, 4)
    assert [tile.uri for tile in tiles(predictions, worst, shards)] == [
        tile.uri for tile in tiles(predictions, worst, sparrows)
    ]


def test_images_that_are_bad_or_gone_cost_no_report(tmp_path: Path) -> None:
    plant(tmp_path / "set", "a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg")
    images = open_images(tmp_path / "set")
    predictions = predictions_of(images, tmp_path / "run")
    (tmp_path / "set/a/1.jpg").write_bytes(b"nothing")
    (tmp_path / "set/b/1.jpg").unlink()
    found = {tile.name: tile.picture for tile in tiles(predictions, range(4), images)}
    assert [name for name, picture in found.items() if picture is None] == ["a/1.jpg", "b/1.jpg"]
    assert all(tile.uri == "" for tile in tiles(predictions, range(4), None))


@needs_sparrows
@pytest.mark.parametrize(("pool", "kind"), [("isqrt_cov", "exact"), ("bcnn", "gradient")])
@pytest.mark.usefixtures("_no_figures")
def test_the_report_shows_where_it_looks(sparrows: ImageSet, tmp_path: Path, pool: str, kind: str) -> None:
    images = sparrows
    folder = write_run(tmp_path / "run", images.classes, labelled(images))
    torch.manual_seed(0)
    model = create_model("test_resnet", pool=pool, dim=8, num_classes=len(images.classes))
    model.classes = images.classes
    found = looks(read_run(folder).predictions, images, model)
    assert [look.is_right for look in found] == [True] * EACH + [False] * EACH
    assert {look.kind for look in found} == {kind}
    for look in found:
        for uri in (look.picture, look.map):
            content = base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))
            assert Image.open(io.BytesIO(content)).size == (160, 160)
    page = write_report(folder, images, model).read_text(encoding="utf-8")
    assert page.count("evidence map for") == 2 * EACH
    assert ("are approximate: this pooling" in page) == (kind == "gradient")


@pytest.mark.slow
@needs_sparrows
def test_without_a_model_there_are_no_maps(tmp_path: Path) -> None:
    images = open_splits(str(SPARROWS))["test"]
    folder = write_run(tmp_path / "run", images.classes, labelled(images))
    page = write_report(folder, images).read_text(encoding="utf-8")
    assert not re.search("Evidence maps", page)
