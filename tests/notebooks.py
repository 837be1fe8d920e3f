"""Execute the notebooks of docs/tutorials. ``python -m tests.notebooks [NAME ...]`` stores the outputs."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

import covpool
from tests.data.pictures import SPARROWS, TINY10

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorials"
# The images for each notebook. Some notebooks generate their own images or signals.
IMAGES = {
    "0_the_idea": None,
    "1_the_layer": TINY10,
    "2_fine_tune": SPARROWS,
    "3_probe_a_vit": TINY10,
    "4_sequences": None,
    "5_export_and_serve": SPARROWS,
}
SECONDS = 900  # per cell


def read(name: str) -> NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(name: str, scratch: Path) -> NotebookNode:
    """Execute a notebook in a new kernel, in an empty folder with a link to the examples."""
    notebook, folder = read(name), scratch / "docs" / "tutorials"
    folder.mkdir(parents=True)
    (scratch / "examples").symlink_to(ROOT / "examples")
    # tqdm, which timm imports, warns about missing widgets. Nothing here uses them.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found"}
    environment["PYTHONPATH"] = str(Path(covpool.__file__).parents[1])
    if IMAGES[name] is not None:
        environment["COVPOOL_IMAGES"] = str(IMAGES[name])
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources=where,
        record_timing=False,
        coalesce_streams=True,
    )
    return client.execute(env=environment)


def without_stderr(notebook: NotebookNode) -> NotebookNode:
    """Remove stderr from the outputs: progress lines depend on the speed of the machine."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def store(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        notebook = without_stderr(executed(name, Path(scratch)))
    notebook.metadata.language_info = {"name": "python"}  # without the local Python version
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    before = 0.0
    for name in sys.argv[1:] or IMAGES:
        store(name)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{name}: {used.ru_utime + used.ru_stime - before:.0f} CPU seconds", flush=True)
        before = used.ru_utime + used.ru_stime
