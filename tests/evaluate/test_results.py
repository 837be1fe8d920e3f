from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from covpool.evaluate.results import PACKAGE, begin_results, prepare_folder, write_results
from covpool.provenance import schema


@pytest.mark.parametrize("name", ["accuracy", "retrieval", "shared"])
def test_schema_is_a_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(PACKAGE, name))


def test_results_that_do_not_follow_their_schema_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(jsonschema.ValidationError):
        write_results(tmp_path, {"protocol": "accuracy", "seed": "none"})
    assert not list(tmp_path.iterdir())


def test_a_folder_is_new_or_of_the_same_protocol(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    prepare_folder(folder, "accuracy")
    prepare_folder(folder, "accuracy")
    (folder / "results.json").write_text('{"protocol": "accuracy"}')
    prepare_folder(folder, "accuracy")
    with pytest.raises(ValueError, match="holds other files: use a new --out, or that of an earlier search"):
        prepare_folder(folder, "retrieval")


def test_a_folder_is_known_though_its_writing_was_stopped(tmp_path: Path) -> None:
    """Earlier results are removed, because they do not belong to the new files."""
    (tmp_path / "results.json").write_text('{"protocol": "accuracy"}')
    begin_results(tmp_path, "accuracy")
    (tmp_path / "predictions.csv").write_text("new")
    assert not (tmp_path / "results.json").exists()
    prepare_folder(tmp_path, "accuracy")
    with pytest.raises(ValueError, match="holds other files"):
        prepare_folder(tmp_path, "retrieval")


def test_half_a_file_is_nothing(tmp_path: Path) -> None:
    (tmp_path / ".results.json.covpool-saving").write_text("{")
    prepare_folder(tmp_path, "probe")


@pytest.mark.parametrize("text", ["[]", "{", '{"metrics": 1}'])
def test_other_peoples_results_are_not_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"holds other files: .* of an earlier evaluation"):
        prepare_folder(tmp_path, "accuracy")


def test_results_do_not_go_among_the_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results would go into the images themselves"):
        prepare_folder(tmp_path / "evaluation", "accuracy", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: use another --out"):
        prepare_folder(tmp_path / "file", "accuracy")
