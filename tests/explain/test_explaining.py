from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from covpool import create_model, load_model, save_model
from covpool.cli.main import main
from covpool.errors import UsageError
from covpool.explain.evidence import Evidence, evidence_maps
from covpool.explain.evidence_figures import AGAINST, FOR, contrast, draw_sheet, overlay, strongest_pairs
from covpool.explain.explaining import _number, explain_images, explained, some_images
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.data.trees import plant


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=3)
    model.classes = ("ant", "bee", "wasp")
    folder = tmp_path_factory.mktemp("bundle") / "b"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("images") / "one.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 240, 3), dtype=np.uint8)).save(file)
    return file


def test_one_image(bundle: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", str(bundle), str(picture), "--out", str(tmp_path / "out"), "--against", "ant"]
    assert main([*words, "--pairs", "true", "--top", "2"]) == 0
    output = capsys.readouterr().out
    assert "1 image explained" in output
    assert "maps are exact: sums and logits differ by" in output
    assert f"figure: {tmp_path / 'out' / '001-one.png'}\n" in output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    rows = json.loads((tmp_path / "out" / "maps.json").read_text())
    assert rows[0]["logit"] == max(row["logit"] for row in rows)
    predicted = rows[0]["class"]
    assert {"001-one.png", "001-one-pairs.png", "maps.json"} <= names
    assert "001-one-against.png" in names
    assert main([*words[:-1], predicted]) == 2
    assert f"--against {predicted}: that is the most probable class itself" in capsys.readouterr().err
    assert "ant" in {row["class"] for row in rows}
    for row in rows:
        total = np.array(row["positions"]).sum() + row["rest"]
        assert total == pytest.approx(row["logit"], abs=1e-5)


def test_backbone_runs_once(bundle: Path, picture: Path) -> None:
    model = load_model(bundle)
    calls = []
    first = next(module for module in model.backbone.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_hook(lambda *_: calls.append(1))
    result = explained(model, picture.read_bytes(), "one", rival=1)
    assert len(result.evidence) == 3
    assert len(calls) == 1


@needs_sparrows
def test_a_folder(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(bundle), str(SPARROWS), "--out", str(tmp_path / "o"), "--limit", "4"]) == 0
    names = sorted(path.name for path in (tmp_path / "o").iterdir())
    assert len(names) == 4 + 2
    assert names[-1] == "sheet.png"
    assert f"figure: {tmp_path / 'o' / 'sheet.png'}\n" in capsys.readouterr().out
    images = {row["image"] for row in json.loads((tmp_path / "o" / "maps.json").read_text())}
    assert len({Path(name).parent for name in images}) == 4  # spread over the classes


def test_a_class_that_is_not_there(bundle: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(bundle), str(picture), "--classes", "[wesp]"]) == 2
    assert "the bundle has no class 'wesp': did you mean 'wasp'?" in capsys.readouterr().err


def test_a_class_is_found_without_its_number_and_its_capitals() -> None:
    names = ("118.House_Sparrow", "119.Field_Sparrow", "wren")
    assert [_number(names, name) for name in ("House_Sparrow", "field sparrow", "Wren")] == [0, 1, 2]
    with pytest.raises(UsageError, match=r"its classes are 118\.House_Sparrow, 119"):
        _number(names, "ostrich")


@needs_sparrows
def test_hidden_files_are_no_images(tmp_path: Path) -> None:
    photo = next(SPARROWS.rglob("*.jpg")).read_bytes()
    for name in ("wren.jpg", "._wren.jpg"):
        (tmp_path / name).write_bytes(photo)
    assert [image.name for image in some_images(tmp_path, 9)] == ["wren.jpg"]


def test_bad_images_are_counted(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This also works in a folder without classes."""
    images = tmp_path / "images"
    images.mkdir()
    for name in ("red", "blue"):
        Image.new("RGB", (64, 64), name).save(images / f"{name}.png")
    (images / "bad.png").write_bytes(b"\x89PNG and no more")
    (images / "notes.txt").write_text("no image")
    assert main(["explain", str(bundle), str(images), "--out", str(tmp_path / "out")]) == 0
    assert "2 images explained; 1 could not be read" in capsys.readouterr().out
    assert {row["image"] for row in json.loads((tmp_path / "out" / "maps.json").read_text())} == {
        "red.png",
        "blue.png",
    }


@pytest.mark.slow
def test_a_picture_beside_the_classes_is_none_of_them(bundle: Path, picture: Path, tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        shutil.copy(picture, tmp_path / "data" / name / f"{name}.png")
    shutil.copy(picture, tmp_path / "data" / "overview.png")
    explain_images(bundle, tmp_path / "data", tmp_path / "out", limit=2)
    rows = json.loads((tmp_path / "out" / "maps.json").read_text())
    assert {row["image"] for row in rows} == {"ant/ant.png", "bee/bee.png"}


def test_odd_files(bundle: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest possible file name, and an image of one row, which would be resized to gigabytes."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(picture, data / f"{'鳥' * 80}.png")
    Image.new("RGB", (20000, 1)).save(data / "line.png")
    assert main(["explain", str(bundle), str(data), "--out", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["folder"], result["images"], result["bad"]) == (str(tmp_path / "out"), 1, 1)
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == [f"002-{'鳥' * 33}.png"]


def test_colours() -> None:
    grey = Image.new("RGB", (40, 20), (128, 128, 128))
    drawn = np.asarray(overlay(grey, torch.tensor([[1.0, -1.0]])), dtype=int)
    for x, colour in ((2, FOR), (37, AGAINST)):
        away = np.abs(drawn[10, x] - np.array(colour)).sum()
        assert away < np.abs(128 - np.array(colour)).sum()
    plain = np.asarray(overlay(grey, torch.zeros(2, 2)), dtype=int)
    assert plain.std() == 0


def test_a_difference_of_classes_is_a_difference_of_logits() -> None:
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=3, join="gap").eval()
    this, that = evidence_maps(model, torch.randn(3, 160, 160), [0, 2])
    total = float(contrast(this, that).sum()) + this.rest - that.rest
    assert total == pytest.approx(this.logit - that.logit, abs=1e-5)


def test_strongest_pairs() -> None:
    pairs = torch.zeros(9, 9)
    pairs[0, 8] = pairs[8, 0] = 2.0
    pairs[0, 2] = pairs[2, 0] = -3.0
    pairs[0, 1] = pairs[1, 0] = 9.0  # adjacent positions
    one = Evidence(0, 0.0, "exact", torch.zeros(3, 3), None, 0.0, pairs)
    assert strongest_pairs(one) == [(0, 8, 4.0), (0, 2, -6.0)]


def test_the_sheet_does_not_call_what_was_asked_for_the_answer(bundle: Path, picture: Path) -> None:
    model = load_model(bundle)
    one = explained(model, picture.read_bytes(), "one.png")
    other = next(i for i in range(3) if i != one.predicted)
    asked = explained(model, picture.read_bytes(), "one.png", classes=[other])
    assert (asked.predicted, asked.evidence[0].label) == (one.predicted, other)
    words = [axes.get_title() for axes in draw_sheet([asked]).axes]
    assert f"evidence for {('ant', 'bee', 'wasp')[other]}" in words


@pytest.mark.parametrize(("option", "value"), [("--limit", "0"), ("--top", "0"), ("--limit", "-1")])
def test_numbers_that_make_no_sense(
    bundle: Path, picture: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(bundle), str(picture), option, value]) == 2
    assert option.strip("-") in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "shown"), [(1, 1), (3, 3), (24, 24), (45, 45), (100, 45)])
def test_they_are_spread_over_the_classes(tmp_path: Path, limit: int, shown: int) -> None:
    plant(tmp_path, *(f"{name}/{number:02d}.jpg" for name in "abc" for number in range(15)))
    found = Counter(one.label for one in some_images(tmp_path, limit))
    assert sum(found.values()) == shown
    if limit >= 3:
        assert set(found.values()) == {shown // 3}
