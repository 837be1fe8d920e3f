"""Files and links that are no bundle are refused with the reason, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import covpool
from covpool.models import card as card_module
from covpool.models.bundle import load_model
from tests.models.bundles.judging import assert_not_loaded, assert_refused
from tests.models.bundles.samples import CLASSES, edit_card, put_weights


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short or not JSON"),
        (b"\x80\x04N.", "not JSON: 'utf-8' codec"),
        ('{"format": "Käse"}'.encode("latin-1"), "not JSON: 'utf-8' codec"),
        (b'\xef\xbb\xbf{"format": "covpool"}', "not JSON"),
        (b"[1, 2]", r"not a covpool card but \[1, 2\]"),
        (b"{}", "another program's: its format is None"),
        (b'{"format": "coverage pool", "version": 3}', "another program's: its format is 'coverage pool'"),
        (b'{"format": "\\u001b[2J"}', r"its format is '\\x1b\[2J'"),
        (b'{"format": "covpool"}', "no valid format_version; got None"),
        (b'{"format": "covpool", "format_version": true}', "no valid format_version; got True"),
        (b'{"format": "covpool", "format_version": 1}', "its hash differs"),
        (b'{"format": "covpool", "format": "covpool"}', "a name comes twice"),
        (b'{"format": "covpool", "metrics": NaN}', "NaN is no number of JSON"),
        (b'{"format": "covpool", "metrics": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"format": "covpool", "metrics": 1e999}', "1e999 is no number of JSON"),
        (b'{"format": "\\ud800"}', "not JSON: 'utf-8' codec"),
        (b'{"format": ' + b"[" * 100_000, "lists within lists"),
        (b'{"format": "covpool", "format_version": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"format": "' + b"x" * (card_module.MAX_BYTES + 1), "larger than 16 MiB"),
    ],
)
def test_foreign_cards_are_refused(content: bytes, reason: str, bundle: Path) -> None:
    (bundle / "covpool.json").write_bytes(content)
    assert_refused(bundle, reason)


class Intruder:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _intrude, (str(self.path), "intruded")


def _intrude(path: str, text: str) -> None:
    Path(path).write_text(text)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_pickles_are_refused_and_not_run(how: str, bundle: Path, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "pickle"
    if how == "pickle":
        file.write_bytes(pickle.dumps(Intruder(trace)))
    else:
        torch.save({"weight": Intruder(trace)}, file)
    put_weights(bundle, file.read_bytes())
    assert_not_loaded(bundle, "not a safetensors file")
    (bundle / "covpool.json").write_bytes(file.read_bytes())
    assert_refused(bundle, "not JSON")
    assert not trace.exists()
    pickle.loads(pickle.dumps(Intruder(trace)))
    assert trace.exists(), "the intruder is harmless, and the test with it"


@pytest.mark.parametrize(
    ("readable_by", "remedy"),
    [
        ("0.9.0", "pip install 'covpool>=0.9.0'$"),
        ("1.0rc1", "pip install 'covpool>=1.0rc1'$"),
        ("0'; rm -rf ~ #", "pip install --upgrade covpool$"),
        (None, "pip install --upgrade covpool$"),
    ],
)
def test_newer_format_says_which_covpool_reads_it(readable_by: object, remedy: str, bundle: Path) -> None:
    # The hash of a newer format may be another: the version comes first.
    newer = {"format_version": 3, "written_by": "0.9.1", "readable_by": readable_by, "hash": "sha3:0"}
    edit_card(bundle, lambda fields: fields.update(newer), rehash=False)
    here = f"this covpool {re.escape(covpool.__version__)} reads up to format 1"
    assert_refused(bundle, rf"written in bundle format 3 by covpool 0\.9\.1; {here}: {remedy}")


def test_missing_things_are_named(bundle: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "there is no such folder")
    assert_refused(bundle / "covpool.json", "there is no such folder")
    (bundle / "model.safetensors").unlink()
    assert_refused(bundle, r"there is no model\.safetensors in it")
    (bundle / "covpool.json").unlink()
    assert_refused(bundle, r"there is no covpool\.json in it")


# Links and other things that are not files


def test_cache_of_links_is_read(bundle: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in bundle.iterdir():
        (snapshot / path.name).symlink_to(f"../../birds/{path.name}")
    assert load_model(snapshot).classes == CLASSES


@pytest.mark.parametrize("name", ["covpool.json", "model.safetensors"])
def test_what_never_ends_is_refused(name: str, bundle: Path) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    assert_refused(bundle, f"its {name} is not a file")
    (bundle / name).unlink()
    (bundle / name).symlink_to("/dev/zero")
    assert_refused(bundle, f"its {name} is not a file")


def test_a_link_to_a_secret_tells_nothing(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2: [")
    (bundle / "covpool.json").unlink()
    (bundle / "covpool.json").symlink_to(tmp_path / "secret")
    assert_refused(bundle, r"^(?!.*hunter2).*not JSON")
