"""Each addition of CONTRIBUTING.md, made in a copy of the sources and used by a real command.

Sources, methods and export targets have such tests next to their own: tests/data/test_adding_a_source.py,
tests/nn/pooling/test_adding_a_method.py and tests/export/test_targets.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.pictures import needs_sparrows
from tests.evaluate.birds import a_bundle, some_sparrows

SOURCE = Path(__file__).parents[1] / "src"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package."""
    shutil.copytree(SOURCE / "covpool", tmp_path / "src" / "covpool", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path / "src" / "covpool"


def insert(file: Path, before: str, text: str) -> None:
    """Write a text before the only occurrence of another one."""
    content = file.read_text("utf-8")
    assert content.count(before) == 1, before
    file.write_text(content.replace(before, f"{text}{before}"), "utf-8")


def run(copy: Path, *words: str) -> str:
    """Run a command with the copied package, in the folder of the copy."""
    done = subprocess.run(
        [sys.executable, "-m", "covpool", *words],
        cwd=copy.parents[1],
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_sparrows
@pytest.mark.slow
def test_a_metric_is_a_line_in_one_file(copy: Path) -> None:
    line = '    "error_rate": Metric("error rate", lambda it: 1 - it.right / it.images),\n'
    insert(copy / "training" / "metrics.py", '    "top5": Metric(', line)
    some_sparrows(copy.parents[1] / "birds", train=1, test=2)
    a_bundle(copy.parents[1] / "bundle")
    assert "error rate" in run(copy, "eval", "bundle", "birds", "--workers", "0", "--out", "out")
    results = json.loads((copy.parents[1] / "out" / "results.json").read_bytes())
    assert results["metrics"]["error_rate"] == pytest.approx(1 - results["metrics"]["top1"])
    assert results["intervals"]["error_rate"]


@pytest.mark.slow
def test_a_recipe_field_is_a_line_and_its_use(copy: Path) -> None:
    recipe = copy / "training" / "recipe.py"
    insert(recipe, "        mixup: mix images", "        focus: exponent of the focal loss; 0 for none.\n")
    insert(recipe, "    mixup: float = 0.0\n", "    focus: float = 0.0\n")
    text = run(copy, "train", "birds", "--loss.focus", "2", "--print-config")
    assert "focus: 2.0" in text


@pytest.mark.slow
def test_a_command_is_a_file_and_a_line(copy: Path) -> None:
    (copy / "cli" / "count.py").write_text(
        '''"""``covpool count``."""

from dataclasses import dataclass
from pathlib import Path

from covpool.cli.main import Command


@dataclass(frozen=True)
class Arguments:
    """Count the files of a folder.

    Attributes:
        data: a folder.
    """

    data: Path


@dataclass(frozen=True)
class Result:
    """The number of files."""

    files: int


count = Command(
    Arguments,
    "covpool count birds",
    lambda arguments: Result(len(list(arguments.data.iterdir()))),
    lambda result: f"{result.files} files",
)
'''
    )
    line = '        "count": Verb("number of files", "data", file="count"),\n'
    insert(copy / "cli" / "main.py", '        "check": Verb(', line)
    assert "1 files" in run(copy, "count", "src")
    assert "number of files" in run(copy, "--help")
