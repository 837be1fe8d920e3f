"""The tutorials run, and their outputs match the stored ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
from nbformat import NotebookNode

from tests.notebooks import FOLDER, IMAGES, executed, read, without_stderr

MAX_BYTES = 150_000

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="tests without the checkout around them")


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kind(output: NotebookNode) -> tuple[Any, ...]:
    """Return the kind of an output, without numbers and pictures, which differ between machines."""
    if output.output_type == "stream":
        return output.name, len(output.text.splitlines())
    return output.output_type, sorted(output.data)


def kinds(notebook: NotebookNode) -> list[list[tuple[Any, ...]]]:
    return [[kind(output) for output in cell.outputs] for cell in code(notebook)]


def test_all_are_known() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(IMAGES)


@pytest.mark.parametrize("name", IMAGES)
def test_outputs_are_stored(name: str) -> None:
    notebook = read(name)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert any(cell.outputs for cell in code(notebook))
    assert all(output.output_type != "error" for cell in code(notebook) for output in cell.outputs)
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES
    assert re.findall(r"/(?:root|home|tmp|Users)/\w+", text) == []


@pytest.mark.parametrize("name", IMAGES)
def test_links(name: str) -> None:
    for cell in read(name).cells:
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (FOLDER / link).exists(), link


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_it_runs_and_gives_what_is_stored(name: str, tmp_path: Path) -> None:
    images = IMAGES[name]
    if images is not None and not images.is_dir():
        pytest.skip(f"{images.name} is not next to the project")
    found = executed(name, tmp_path)
    stderr = "".join(
        output.text for cell in code(found) for output in cell.outputs if output.get("name") == "stderr"
    )
    assert "Warning" not in stderr, stderr
    assert kinds(without_stderr(found)) == kinds(read(name))
