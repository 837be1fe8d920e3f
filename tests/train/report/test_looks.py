"""Maps of a few images in the report."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from covpool import create_model
from covpool.data.sources import open_splits
from covpool.train.report import write_report
from covpool.train.report.figures import EACH, looks
from covpool.train.report.record import read_run
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.train.report.runs import labelled, write_run


@needs_sparrows
@pytest.mark.parametrize(
    ("pool", "kind"), [("isqrt_cov", "exact"), pytest.param("bcnn", "gradient", marks=pytest.mark.slow)]
)
def test_the_report_shows_where_it_looks(tmp_path: Path, pool: str, kind: str) -> None:
    images = open_splits(str(SPARROWS))["test"]
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
    assert page.count("map of what speaks for") == 2 * EACH
    assert ("By gradient: an approximation" in page) == (kind == "gradient")


@pytest.mark.slow
@needs_sparrows
def test_without_a_model_there_are_no_maps(tmp_path: Path) -> None:
    images = open_splits(str(SPARROWS))["test"]
    folder = write_run(tmp_path / "run", images.classes, labelled(images))
    page = write_report(folder, images).read_text(encoding="utf-8")
    assert not re.search("Where it looks", page)
