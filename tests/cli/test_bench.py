"""``covpool bench``: the suites by one verb."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from covpool.bench import run_methods
from covpool.bench.results import read_results
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


def test_isqrt_cov_measures_and_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "isqrt_cov", "--out", str(tmp_path), "--compiled", "false", "--json", *SMALL]) == 0
    written = [Path(path) for path in json.loads(capsys.readouterr().out)["files"]]
    assert [path.suffix for path in written] == [".json", ".md", ".png"]
    assert read_results(written[0])["sizes"]["6:4"]["batch"] == 2

    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:begin -->\n<!-- benchmark:end -->\n", encoding="utf-8")
    assert main(["bench", "render", str(written[0]), "--page", str(page)]) == 0
    assert capsys.readouterr().out.split() == [*map(str, written[1:]), str(page)]
    assert "6:4" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "say which: methods, isqrt_cov, training, render"),
        (["magic"], "say which: methods, isqrt_cov, training, render; got 'magic'"),
        (["isqrt_cov", "--sizes", "[huge]"], "sizes must be among"),
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
