"""Nothing in the package uses pickle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import covpool

SOURCE = Path(covpool.__file__).parent
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def pickling(source: str) -> Iterator[str]:
    """Yield everything in the source that pickles or unpickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            yield from PICKLERS & {module.partition(".")[0] for module in modules}
        elif isinstance(node, ast.Call):
            function, options = ast.unparse(node.func), {ast.unparse(option) for option in node.keywords}
            if function == "torch.save" or "allow_pickle=True" in options:
                yield ast.unparse(node)
            if function == "torch.load" and "weights_only=True" not in options:
                yield ast.unparse(node)


def test_nothing_is_pickled_in_the_package() -> None:
    paths = list(SOURCE.rglob("*.py"))
    assert len(paths) > 20
    assert not {str(path): found for path in paths if (found := [*pickling(path.read_text("utf-8"))])}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import json, pickle as p",
        "from pickle import loads",
        "torch.save(model, path)",
        "torch.load(path)",
        "torch.load(open(path), weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_pickling_would_be_found(source: str) -> None:
    assert [*pickling(source)]
    assert not [*pickling("torch.load(str(path), weights_only=True); safetensors.torch.save(tensors)")]
