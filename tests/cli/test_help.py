"""``--help`` is complete and made from the options, and quick where the build has written it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import covpool
from covpool.cli.main import VERBS, long_help, main
from lab.write_help import make_help
from tests.test_words import avoided_words


@pytest.fixture(scope="module")
def text() -> str:
    return make_help()


@pytest.fixture(scope="module")
def built(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the file that a build adds."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(Path(covpool.__file__).parent, folder / "covpool")
    (folder / "covpool" / "cli" / "help.txt").write_text(text, "utf-8")
    return folder


def test_the_file_has_the_help_of_every_verb(text: str, built: Path) -> None:
    code = "import sys; from covpool.cli.main import long_help; print(long_help(sys.argv[1]))"
    assert [part.partition("\n")[0] for part in text.split("######## ")[1:]] == [*VERBS]
    for verb in ("demo", "fit", "doctor"):
        printed = subprocess.run(
            [sys.executable, "-c", code, verb],
            env={**os.environ, "PYTHONPATH": str(built)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert printed == f"{long_help(verb)}\n"


def test_other_packages_are_not_imported(built: Path) -> None:
    code = """
import sys
from covpool.cli.main import VERBS, main
for verb in VERBS:
    assert main([verb, "--help"]) == 0
assert not {"torch", "jsonargparse", "PIL", "timm"} & sys.modules.keys()
"""
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(built)}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    assert time.monotonic() - started < 2  # seconds, for all verbs together


def test_a_checkout_without_the_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "covpool.cli.parser", raising=False)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert main(["demo", "--help"]) == 2
    assert capsys.readouterr().err == "covpool demo: jsonargparse is missing: pip install 'covpool[train]'\n"


def test_the_help_avoids_words_that_make_readers_stop(text: str) -> None:
    assert avoided_words(text) == []


@pytest.mark.parametrize("verb", ["train", "lr-find"])
def test_the_defaults_are_those_of_the_recipes(verb: str) -> None:
    text = " ".join(long_help(verb).split())
    assert "--epochs EPOCHS number of training epochs (default: 60; with pretrained weights 30)" in text
    assert "(default: 0.0005; with pretrained weights 0.0002)" in text


@pytest.mark.parametrize("verb", ["train", "lr-find"])
def test_rare_options_are_in_the_long_help_only(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    short = capsys.readouterr().out
    assert main([verb, "--help-all"]) == 0
    long = capsys.readouterr().out
    options = [line for line in short.splitlines() if line.startswith("  --")]
    assert len(options) <= 26
    for part in ("--lr LR", f"covpool {verb} --help-all", "example:"):
        assert part in short
    assert "--optimizer.momentum" not in short
    assert "--optimizer.momentum" in long
