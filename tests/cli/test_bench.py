"""``covpool bench``: output, error messages and options."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from lab.bench import read_results, run_methods
from covpool.cli.bench import Arguments
from covpool.cli.main import main
from covpool.cli.parser import make_parser

SMALL = ["--sizes", '["6:4"]', "--batch", "2", "--rounds", "2", "--sections", "[layers]"]


def test_it_prints_the_tables_and_where_the_figures_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--methods", "[gap,mpn_cov]", "--out", str(tmp_path), *SMALL]) == 0
    *report, file = capsys.readouterr().out.splitlines()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [Path(file)]
    assert any(line.startswith("| `mpn_cov` ") for line in report)
    assert list(read_results(file)["layers"]["6:4"]["entries"])[-1] == "mpn_cov"
    assert main(["bench", "--methods", "[gap]", "--out", str(tmp_path), *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == file


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["magic"], "magic"),
        (["--sizes", "[huge]"], "sizes must be among"),
        (["--methods", "[magic]"], "methods must be one of"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_every_option_is_described() -> None:
    parser = make_parser("covpool bench", Arguments)
    assert [action.dest for action in parser._actions if not action.help] == []
    assert "``" not in parser.format_help()


def test_defaults_are_those_of_the_function() -> None:
    defaults = {name: known.default for name, known in inspect.signature(run_methods).parameters.items()}
    assert Arguments().out == "runs/bench"
    assert Arguments().rounds == defaults.pop("schedule").rounds
    for name in set(defaults) - {"out", "setting", "progress"}:
        assert getattr(Arguments(), name) == defaults[name], name
