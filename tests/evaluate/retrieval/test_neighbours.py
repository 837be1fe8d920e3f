from __future__ import annotations

import numpy as np
from matplotlib.colors import to_hex
from PIL import Image

from covpool.drawing import LIGHT, png
from covpool.evaluate.figures import RIGHT, WRONG, Shown, chosen_queries, draw_neighbours
from covpool.evaluate.search import Scores


def scores_of(precision: list[float]) -> Scores:
    values = np.array(precision)
    matches = np.where(np.isnan(values), 0, 3)
    return Scores(matches, matches, values, values, np.zeros((len(values), 1), dtype=np.int64))


def test_half_are_the_worst_and_the_others_are_spread() -> None:
    precision = [0.9] * 100
    precision[40], precision[70], precision[10] = 0.2, 0.1, float("nan")
    chosen = chosen_queries(scores_of(precision), most=4)
    assert chosen[:2] == [70, 40]
    assert len(set(chosen)) == 4
    assert chosen[2] < 40 < 60 < chosen[3]
    assert 10 not in chosen_queries(scores_of(precision), most=100)


def test_all_of_a_few_are_chosen_once() -> None:
    assert sorted(chosen_queries(scores_of([0.5, 0.1, 0.3]), most=10)) == [0, 1, 2]


def test_frames_tell_right_from_wrong() -> None:
    picture = Image.new("RGB", (30, 20))
    jay, wren, odd = Shown("jay", picture), Shown("wren", picture), Shown("$x_{\n", None)
    figure = draw_neighbours([(jay, 0.5, [jay, wren, odd])], LIGHT)
    frames = [to_hex(frame.get_edgecolor()) for frame in figure.axes[0].patches]
    assert frames == [LIGHT.ink, RIGHT, WRONG, WRONG]
    assert png(figure).startswith(b"\x89PNG")
