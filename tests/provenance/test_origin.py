from __future__ import annotations

from pathlib import Path

from covpool.provenance.origin import new_results, results_file, results_path


def test_a_development_version_writes_to_the_release_it_leads_to(tmp_path: Path) -> None:
    results = new_results((), {}, "cpu", None)
    results["versions"]["covpool"] = "0.3.0.dev7"
    path = results_path(tmp_path, "table9", results)
    assert path.parent == tmp_path / "0.3.0"
    assert path.name.startswith("table9--")
    assert path.name.endswith("--cpu.json")


def test_of_several_machines_one_is_shown(tmp_path: Path) -> None:
    assert results_file(tmp_path, "table9") is None
    for name in ("table9--b--cpu.json", "table9--a--cpu.json", "table90--a--cpu.json", "table9--a--cpu.md"):
        (tmp_path / name).touch()
    assert results_file(tmp_path, "table9") == tmp_path / "table9--a--cpu.json"
