"""``python -m lab``: the table of commands, their options, output and error messages."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import docstring_parser
import pytest

from lab.__main__ import COMMANDS, FIGURES, main
from lab.record import ROOT, read_record

SMALL = ["--sizes", '["6:4"]', "--batch", "2", "--rounds", "2", "--sections", "[layers]"]
FUNCTIONS = {**COMMANDS, **{f"figures {name}": found for name, found in FIGURES.items()}}


@pytest.mark.parametrize("command", FUNCTIONS)
def test_every_command_exists_and_describes_its_options(command: str) -> None:
    function = pkgutil.resolve_name(f"lab.{FUNCTIONS[command][0]}")
    described = docstring_parser.parse(function.__doc__).params
    assert [one.arg_name for one in described] == [*inspect.signature(function).parameters]


def test_every_module_with_an_entry_is_listed() -> None:
    listed = {found.partition(":")[0] for found, _ in FUNCTIONS.values()}
    for file in (ROOT / "lab").rglob("*.py"):
        if re.search(r"^def (main|write_pages)\(", file.read_text("utf-8"), re.MULTILINE):
            module = file.relative_to(ROOT / "lab").with_suffix("").as_posix().replace("/", ".")
            assert module in {*listed, "__main__"}


def test_the_list_is_printed_from_a_checkout() -> None:
    words = [sys.executable, "-m", "lab", "--help"]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {name} " in printed for name in (*COMMANDS, "figures"))
    words.insert(3, "figures")
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {name} " in printed for name in FIGURES)


def test_bench_prints_the_tables_and_where_the_figures_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--methods", "gap,mpn_cov", "--out", str(tmp_path), *SMALL]) == 0
    *report, file = capsys.readouterr().out.splitlines()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [Path(file)]
    assert any(line.startswith("| `mpn_cov` ") for line in report)
    found = read_record(file, "methods")["layers"]
    assert list(found["6:4"]["entries"])[-1] == "mpn_cov"
    # The same command has nothing left to measure.
    assert main(["bench", "--methods", "[gap,mpn_cov]", "--out", str(tmp_path), *SMALL]) == 0
    assert read_record(file)["layers"] == found
    assert main(["bench", "--methods", "[gap]", "--out", str(tmp_path), *SMALL]) == 2
    assert "entries changed since; pass --again to start again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["magic"], "python -m lab: 'magic' is not one of bench, isqrt_cov"),
        (["figures", "magic"], "python -m lab figures: 'magic' is not one of accuracy, llms"),
        (["bench", "--sizes", "[huge]"], "sizes must be among"),
        (["bench", "--methods", "[magic]"], "methods must be one of"),
        (["bench", "--batch", "0", "--rounds", "2"], "batch must be at least 1; got 0"),
        (["bench", "--rounds", "1"], "rounds must be at least 2; got 1"),
        (["reproduce", "table9"], "experiment must be one of"),
        (["reproduce", "figure2"], "give --data the folder tiny-imagenet-200"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_pages_name_commands_that_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in [*pages, *(ROOT / "lab").rglob("*.py")])
    named = re.findall(r"python\s-m\slab (figures )?([a-z]\w+)", text)
    assert len(named) > 30
    unknown = [name for figure, name in named if name not in (FIGURES if figure else {*COMMANDS, "figures"})]
    assert unknown == []
