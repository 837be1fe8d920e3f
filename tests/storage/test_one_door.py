"""Only the storage package opens, writes, renames, locks and hashes files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import covpool

SOURCE = Path(covpool.__file__).parent
# Modules that nothing else imports.
MODULES = {"hashlib", "tempfile", "fcntl"}
# Functions of modules, by their full name.
FUNCTIONS = {
    *("os.open", "os.fdopen", "os.replace", "os.rename", "os.symlink", "os.link", "io.open", "open"),
    *("shutil.rmtree", "shutil.move", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree"),
}
# Methods of paths, whatever the object is called.
METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "rename", "touch", "symlink_to"}
# Functions of libraries that open a path themselves; they need one that storage has checked, or bytes.
LIBRARIES = {
    *("safe_open", "load_file", "save_file", "torch.load", "torch.save", "torch.export.load"),
    *("np.load", "np.save", "np.savez", "np.memmap", "npy.open_memmap", "np.fromfile"),
    *("onnx.load", "onnx.save", "zipfile.ZipFile", "tarfile.open", "tarfile.TarFile", "SummaryWriter"),
    *("pq.ParquetFile", "pq.read_table", "pq.write_table", "pyarrow.csv.read_csv", "pyarrow.csv.write_csv"),
}
EXCEPTIONS = {
    ("cli/main.py", "os.open"): "standard output that nobody reads becomes the null device",
    ("data/decode.py", "open"): "Image.open reads from memory",
    ("data/shards/scan.py", "tarfile.TarFile"): "reads from a file of open_regular",
    (
        "data/sources/parquet_file.py",
        "pq.ParquetFile",
    ): "reads from a file of Address.opened",
    ("export/onnx_precision.py", "onnx.load"): "a file in a scratch folder of this process",
    ("export/onnx_precision.py", "onnx.save"): "a file in a scratch folder of this process",
    ("export/targets.py", "torch.export.load"): "the file that this process has just written",
    ("export/targets.py", "zipfile.ZipFile"): "reads from a file of open_regular",
    ("inference/store.py", "np.memmap"): "maps a file of open_regular",
    ("inference/tasks.py", "pq.read_table"): "reads from memory",
    ("inference/tasks.py", "pq.write_table"): "writes to memory",
    ("inference/tasks.py", "pyarrow.csv.read_csv"): "reads from memory",
    ("inference/tasks.py", "pyarrow.csv.write_csv"): "writes to memory",
    ("models/divided.py", "safe_open"): "gets a path of check_regular",
    ("models/weights.py", "load_file"): "gets a path of check_regular",
    ("models/weights.py", "torch.load"): "gets a path of check_regular",
    ("training/checkpoint.py", "safe_open"): "gets a path of check_regular",
    ("training/journal.py", "SummaryWriter"): "gets a folder of make_folder, which is not a link",
}
# They leave the package.
MEASUREMENTS = ("bench", "reproduce")


def full_name(node: ast.expr) -> str:
    """Return a dotted name such as ``os.path.join``; empty for anything else."""
    if isinstance(node, ast.Attribute) and (before := full_name(node.value)):
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_path_replace(node: ast.Call) -> bool:
    """Return whether a call is ``Path.replace``: other functions of this name have more arguments."""
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr == "replace"
        and not (len(node.args) != 1 or node.keywords)
    )


def file_calls(tree: ast.AST) -> Iterator[str]:
    """Yield what a file does with files, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            yield from ([str(node.module)] if node.module in MODULES else [])
            yield from sorted(
                name
                for name in FUNCTIONS
                if name.rpartition(".")[0] == node.module and name.rpartition(".")[2] in names
            )
        elif isinstance(node, ast.Call):
            name = full_name(node.func)
            if name in FUNCTIONS | LIBRARIES:
                yield name
            elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield node.func.attr
            elif is_path_replace(node):
                yield "replace"
        elif isinstance(node, ast.Attribute) and full_name(node) in FUNCTIONS:
            yield full_name(node)


def test_only_storage_touches_files() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in ("storage", *MEASUREMENTS)
        for name in file_calls(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - found == set(), "no longer needed"
    assert all(EXCEPTIONS.values())


def test_the_rule_finds_every_way() -> None:
    source = """
import hashlib
from os import replace
from tempfile import mkstemp
with open("a") as file: pass
os.replace(a, b)
path.replace(other)
path.parent.rename(other)
Path("x").write_bytes(b"")
call(os.rename)
safe_open(path, framework="pt")
text.replace("a", "b")
dataclasses.replace(card, file="x")
"""
    assert sorted(set(file_calls(ast.parse(source)))) == [
        *("hashlib", "open", "os.rename", "os.replace", "rename", "replace", "safe_open", "tempfile"),
        "write_bytes",
    ]
