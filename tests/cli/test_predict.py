"""``covpool predict`` and ``covpool embed`` as commands."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from covpool.cli.main import main
from covpool.models import create_model, save_model
from tests.inference.small import pictures, write_folder


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(create_model("test_resnet", dim=8, num_classes=3, image_size=64), tmp_path / "bundle")
    write_folder(tmp_path / "photos", pictures(12))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
def test_as_a_person_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "bundle", "photos", "--workers", "0", "--rows-per-file", "5", "--top", "1"]
    assert main(command) == 0
    *answers, rows, bad = capsys.readouterr().out.splitlines()
    assert len(answers) == 12
    assert sum(bool(re.fullmatch(r"[\w/]+\.jpg: [012] \d\d\.\d%", answer)) for answer in answers) == 11
    (unreadable,) = (answer for answer in answers if "truncated" in answer)
    assert unreadable == "00005.jpg: truncated: the end of the JPEG is missing"
    assert rows.startswith("runs/predictions: 12 rows in 3 files, in ")
    assert bad == "unreadable images: 1 of the new ones; see the column error"
    with open("runs/predictions/0000000.csv", newline="") as file:
        assert list(csv.DictReader(file).fieldnames or ()) == ["id", "label1", "score1", "error"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines() == [
        *answers,
        "runs/predictions: 12 rows in 3 files, all of them there already",
    ]
    assert main([*command, "--flip", "--out", "runs/predictions"]) == 2
    assert capsys.readouterr().err == (
        "covpool predict: runs/predictions holds rows of another job (flip was False, is True): use the "
        "same settings to resume it, or give another folder by --out\n"
    )


@pytest.mark.usefixtures("_here")
def test_one_photograph_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "bundle", "photos/00001.jpg", "--workers", "0", "--top", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["id"] == "00001.jpg"
    assert row["score1"] > row["score2"] > 0


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(("verb", "folder"), [("predict", "runs/predictions"), ("embed", "runs/embeddings")])
def test_another_photograph_goes_into_another_folder(
    verb: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repeated command uses the folder of its first run."""
    folders = {"00001": folder, "00002": f"{folder}-2", "00010": f"{folder}-3"}
    for name in [*folders, *folders]:
        assert main([verb, "bundle", f"photos/{name}.jpg", "--workers", "0", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["out"], result["images"]) == (folders[name], 1)
    assert result["new_images"] == 0
    assert sorted(map(str, Path("runs").iterdir())) == list(folders.values())


@pytest.mark.usefixtures("_here")
def test_other_programs_read_the_folder() -> None:
    assert main(["predict", "bundle", "photos", "--workers", "0", "--format", "parquet"]) == 0
    assert (Path("runs/predictions") / "_job.json").exists()
    assert pq.read_table("runs/predictions").num_rows == 12  # pandas reads it in the same way


@pytest.mark.usefixtures("_here")
def test_vectors_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["embed", "bundle", "photos", "--workers", "0", "--project", "4", "--dtype", "float16", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["out"], result["images"], result["bad_images"]) == ("runs/embeddings", 12, 1)
    kind = pq.read_schema("runs/embeddings/0000000.parquet").field("vector").type
    assert str(kind) == "fixed_size_list<element: halffloat>[4]"


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing", "photos"], "bundle 'nothing': there is no such folder"),
        (["bundle", "nowhere"], "nowhere: No such file or directory"),
        (["bundle", "bundle"], "bundle has no images: their names end in"),
        (["bundle", "photos", "--top", "0"], "top must be"),
        (["bundle", "photos", "--device", "cuda"], "device is cuda, but torch sees no GPU here"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    if "cuda" in words and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["predict", *words]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert sentence in message


@pytest.mark.usefixtures("_here")
def test_json_has_the_predictions_of_more_images_than_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(Path("many"), pictures(25))
    for words in (["--json"], []):
        assert main(["predict", "bundle", "many", "--workers", "0", *words]) == 0
    printed = capsys.readouterr().out
    result, end = json.JSONDecoder().raw_decode(printed)
    assert len(result["rows"]) == result["images"] == 25
    assert printed[end:].strip().startswith("runs/predictions: 25 rows")


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("verb", ["predict", "embed"])
def test_one_unreadable_image_is_an_error(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.jpg").write_text("no image")
    for _ in range(2):  # also when its row is there already
        assert main([verb, "bundle", "notes.jpg", "--workers", "0"]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"covpool {verb}: notes.jpg cannot be used: ")
        assert not captured.out


@pytest.mark.usefixtures("_here")
def test_only_unreadable_images_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad").mkdir()
    for name in ("1.jpg", "2.jpg"):
        Path("bad", name).write_text("no image")
    for _ in range(2):  # also when their rows are there already
        assert main(["predict", "bundle", "bad", "--workers", "0"]) == 2
        assert "none of the 2 images of bad can be used; the first, 1.jpg: " in capsys.readouterr().err
    Path("list.csv").write_text("path\nbad/1.jpg\n")
    assert main(["predict", "bundle", "list.csv", "--workers", "0", "--out", "listed"]) == 2
    assert "covpool predict: bad/1.jpg of list.csv cannot be used: " in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
def test_a_quoted_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos/00001.txt").write_text("no image")
    assert main(["predict", "bundle", "photos/0000[12]*", "--workers", "0", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["00001.jpg", "00002.jpg"]
    assert main(["predict", "bundle", "pho*/**/*.png"]) == 2
    assert "no image matches pho*/**/*.png" in capsys.readouterr().err
