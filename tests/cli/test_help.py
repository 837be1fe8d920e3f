"""``--help`` is quick, complete, and made from the options."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from covpool.cli.main import VERBS, help_texts, main
from covpool.cli.write_help import make_help


def test_the_file_has_the_options() -> None:
    """If this fails, run ``python -m covpool.cli.write_help``."""
    made = make_help()
    assert {*help_texts()} == {*VERBS}
    for verb, text in help_texts().items():
        assert f"######## {verb}\n{text}\n" in made


def test_other_packages_are_not_imported() -> None:
    code = """
import sys
from covpool.cli.main import VERBS, main
for verb in VERBS:
    assert main([verb, "--help"]) == 0
assert not {"torch", "jsonargparse", "PIL", "timm"} & sys.modules.keys()
"""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.monotonic() - started < 2  # seconds, for all verbs together


@pytest.mark.parametrize("verb", ["train", "lr-find"])
def test_the_defaults_are_those_of_the_recipes(verb: str) -> None:
    text = " ".join(help_texts()[verb].split())
    assert "--epochs EPOCHS number of training epochs (default: 60; with pretrained weights 30)" in text
    assert "(default: 0.0005; with pretrained weights 0.0002)" in text


@pytest.mark.parametrize("verb", ["train", "lr-find"])
def test_rare_options_are_in_the_long_help_only(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    short = capsys.readouterr().out
    assert main([verb, "--help-all"]) == 0
    long = capsys.readouterr().out
    options = [line for line in short.splitlines() if line.startswith("  --")]
    assert len(options) <= 25
    for part in ("--lr LR", f"covpool {verb} --help-all", "example:"):
        assert part in short
    assert "--optimizer.momentum" not in short
    assert "--optimizer.momentum" in long
