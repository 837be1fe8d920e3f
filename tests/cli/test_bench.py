"""``covpool bench``: measure, render, mistakes and help."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from covpool.bench import run_methods
from covpool.bench.methods import read_results
from covpool.cli.bench import SUITES, Methods, parse
from covpool.cli.main import main
from covpool.cli.parser import make_parser

SMALL = ["--sizes", '["6:4"]', "--batch", "2", "--rounds", "2"]


def test_methods_prints_the_tables_and_says_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--methods", "[gap,mpn_cov]", "--sections", "[layers]", "--out", str(tmp_path), *SMALL]
    assert main(["bench", "methods", *arguments]) == 0
    *report, figures, page, picture = capsys.readouterr().out.splitlines()
    assert [Path(path).suffix for path in (figures, page, picture)] == [".json", ".md", ".png"]
    assert any(line.startswith("| `mpn_cov` ") for line in report)
    assert list(read_results(figures)["layers"]["6:4"]["entries"])[-1] == "mpn_cov"
    assert main(["bench", "render", figures, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [page, picture]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "covpool bench needs one of methods, render"),
        (["magic"], "covpool bench needs one of methods, render; got 'magic'"),
        (["methods", "--sizes", "[huge]"], "sizes must be among"),
        (["methods", "--methods", "[magic]"], "methods must be one of"),
        (["render", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_help_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in SUITES)


@pytest.mark.parametrize("suite", SUITES)
def test_every_option_is_described(suite: str) -> None:
    parser = make_parser(f"covpool bench {suite}", SUITES[suite])
    assert [action.dest for action in parser._actions if not action.help] == []
    assert "``" not in parser.format_help()


def test_defaults_are_those_of_the_function() -> None:
    arguments, _ = parse(["methods"])
    assert arguments == Methods()
    defaults = {name: known.default for name, known in inspect.signature(run_methods).parameters.items()}
    assert Methods().rounds == defaults.pop("schedule").rounds
    for name in set(defaults) - {"setting", "progress"}:
        assert getattr(Methods(), name) == defaults[name], name
