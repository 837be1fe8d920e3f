"""The format, the names and the resuming of result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covpool.errors import UsageError
from lab.record import (
    ORIGIN,
    RESULTS,
    SAME,
    new_record,
    read_record,
    record_file,
    resumed,
    shown_file,
    write_record,
)


def test_a_development_version_writes_to_the_release_it_leads_to(tmp_path: Path) -> None:
    record = new_record("table9", ())
    assert tuple(sorted(record)) == tuple(sorted(ORIGIN))
    record["versions"]["covpool"] = "0.3.0.dev7"
    file = record_file(record, tmp_path)
    assert file.parent == tmp_path / "0.3.0"
    assert file.name.startswith("table9--")
    assert file.name.endswith("--cpu.json")


def test_of_several_machines_one_is_shown(tmp_path: Path) -> None:
    assert shown_file(tmp_path, "table9") is None
    for name in ("table9--b--cpu.json", "table9--a--cpu.json", "table90--a--cpu.json", "table9--a--cpu.md"):
        (tmp_path / name).touch()
    assert shown_file(tmp_path, "table9") == tmp_path / "table9--a--cpu.json"


def test_a_record_is_resumed_with_its_parts_and_a_new_origin(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "a.json"
    record = new_record("a", ("functional",), {"size": 1}, seed=0) | {"rows": []}
    assert resumed(record, file) is record
    write_record(file, record | {"date": "2020-01-01T00:00:00Z", "rows": [1]}, "# page")
    assert file.with_suffix(".md").read_text() == "# page\n"
    assert resumed(record, file) == record | {"rows": [1]}
    assert resumed(record, file, again=True)["rows"] == []


def test_a_measurement_of_time_is_resumed_by_the_same_code_and_arguments_only(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_record(file, new_record("a", ("functional",), {"size": 1}, seed=0) | {"rows": [1]})
    same = new_record("a", ("functional",), {"size": 1}, seed=0)
    assert resumed(same, file, same=(*SAME, "size"))["rows"] == [1]
    for changed, name in (
        (new_record("a", ("functional",), {"size": 2}, seed=0), "size"),
        (new_record("a", ("functional",), {"size": 1}, seed=1), "seed"),
        (new_record("a", ("functional", "lab/figures"), {"size": 1}, seed=0), "source"),
    ):
        with pytest.raises(UsageError, match=f"cannot resume .*: {name} changed since; pass --again"):
            resumed(changed, file, same=(*SAME, "size"))


def test_another_experiment_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", new_record("a", ()))
    with pytest.raises(UsageError, match="has the results of a, not of b"):
        read_record(tmp_path / "a.json", "b")


def test_committed_results_follow_their_schemas() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 20
    with_schema = {read_record(file).get("experiment") for file in files}
    assert {"methods", "isqrt_cov", "figure2"} <= with_schema


def test_a_broken_reproduction_is_refused(tmp_path: Path) -> None:
    (file,) = RESULTS.rglob("figure2--*.json")
    (tmp_path / file.name).write_text(json.dumps({**json.loads(file.read_bytes()), "runs": 3}))
    with pytest.raises(Exception, match="3 is not of type 'array'"):
        read_record(tmp_path / file.name)
