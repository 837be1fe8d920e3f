"""``covpool predict`` and ``covpool embed`` as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from covpool.cli.main import main
from covpool.models import create_model, save_model
from tests.evaluate.bulk.small import pictures, write_folder


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(create_model("test_resnet", dim=8, num_classes=3, image_size=64), tmp_path / "bundle")
    write_folder(tmp_path / "photos", pictures(12))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
def test_as_a_person_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "bundle", "photos", "--workers", "0", "--rows-per-file", "5", "--top", "1"]
    assert main(command) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("predictions: 12 rows in 3 files, in ")
    assert told[1] == "bad images: 1 of the new ones; the column error says why"
    assert pq.read_table("predictions/0000000.parquet").column_names == ["id", "label1", "score1", "error"]
    assert main(command) == 0
    assert capsys.readouterr().out == "predictions: 12 rows in 3 files, all of them there already\n"
    assert main([*command, "--flip"]) == 2
    assert capsys.readouterr().err == (
        "covpool predict: predictions holds rows of another job (flip was False, is True): use the "
        "same settings to resume it, or give another folder by --out\n"
    )


@pytest.mark.usefixtures("_here")
def test_vectors_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["embed", "bundle", "photos", "--workers", "0", "--project", "4", "--dtype", "float16", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["out"], told["images"], told["bad_images"]) == ("embeddings", 12, 1)
    kind = pq.read_schema("embeddings/0000000.parquet").field("vector").type
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
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert sentence in told
