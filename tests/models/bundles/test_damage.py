"""Damaged, foreign and mismatched files are refused with a reason, and no code in them is run."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import covpool
from covpool.errors import BundleError
from covpool.models import PooledClassifier
from covpool.models.bundle import load_model
from covpool.models.card import MAX_BYTES, read_fields
from covpool.models.saving import save_model
from tests.models.bundles.samples import CLASSES, assert_not_loaded, assert_refused, edit_card, put_weights


def test_weights_cut_short_are_refused(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    for sixteenth in range(16):
        (bundle / "model.safetensors").write_bytes(data[: sixteenth * len(data) // 16])
        assert_refused(bundle, rf"is truncated, \d+ bytes instead of {len(data)}: copy both files again")
    (bundle / "model.safetensors").write_bytes(data + b"\0")
    assert_refused(bundle, "belongs to another card")


def test_weights_cut_short_with_a_card_that_says_so_are_refused(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    for length in (0, 7, 8, 1000, len(data) // 2, len(data) - 1):
        put_weights(bundle, data[:length])
        assert_not_loaded(bundle, "not a safetensors file")


def test_a_flipped_bit_of_the_weights_is_found(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    for place in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        spoilt = bytearray(data)
        spoilt[place] ^= 1
        (bundle / "model.safetensors").write_bytes(spoilt)
        assert_refused(bundle, "its hash differs")


def test_every_flipped_bit_of_the_card_is_found(saved: Path) -> None:
    data = (saved / "covpool.json").read_bytes()
    for place in range(len(data) - 1):  # the last byte is the line end, which carries no data
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << place % 8
        # Whitespace characters between tokens are interchangeable.
        if data[place : place + 1].isspace() and spoilt[place : place + 1].isspace():
            continue
        with pytest.raises(BundleError):
            read_fields(bytes(spoilt))


def test_every_cut_of_the_card_is_found(saved: Path) -> None:
    data = (saved / "covpool.json").read_bytes()
    read_fields(data)
    for length in range(len(data.rstrip())):
        with pytest.raises(BundleError, match="truncated or not JSON"):
            read_fields(data[:length])


def test_edited_class_is_found(bundle: Path) -> None:
    edit_card(bundle, lambda fields: fields["classes"].__setitem__(0, "Crow"), rehash=False)
    assert_refused(bundle, "edited after it was written")


def test_reformatted_card_is_the_same_card(bundle: Path) -> None:
    edit_card(bundle, lambda fields: None, rehash=False)
    assert load_model(bundle).classes == CLASSES


def test_weights_of_another_bundle_are_refused(bundle: Path, other: PooledClassifier) -> None:
    folder = save_model(other, bundle.parent / "other")
    shutil.copy(folder / "model.safetensors", bundle)
    assert_refused(bundle, "belongs to another card")


# Foreign files.


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated or not JSON"),
        (b"\x80\x04N.", "not JSON: 'utf-8' codec"),
        ('{"format": "Käse"}'.encode("latin-1"), "not JSON: 'utf-8' codec"),
        (b'\xef\xbb\xbf{"format": "covpool"}', "not JSON"),
        (b"[1, 2]", r"not a JSON object but \[1, 2\]"),
        (b"{}", "belongs to another program: its format is None"),
        (
            b'{"format": "coverage pool", "version": 3}',
            "another program: its format is 'coverage pool'",
        ),
        (b'{"format": "\\u001b[2J"}', r"its format is '\\x1b\[2J'"),
        (b'{"format": "covpool"}', "no valid format_version; got None"),
        (b'{"format": "covpool", "format_version": true}', "no valid format_version; got True"),
        (b'{"format": "covpool", "format_version": 1}', "its hash differs"),
        (b'{"format": "covpool", "metrics": NaN}', "not JSON: Out of range"),
        (b'{"format": "covpool", "metrics": -Infinity}', "not JSON: Out of range"),
        (b'{"format": "covpool", "metrics": 1e999}', "not JSON: Out of range"),
        (b'{"format": "x", "format": "covpool"}', "not JSON: an object has two fields of the same name"),
        (b'{"format": "\\ud800"}', "not JSON: 'utf-8' codec"),
        (b'{"format": ' + b"[" * 100_000, "not JSON: maximum recursion"),
        (b'{"format": "covpool", "format_version": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"format": "' + b"x" * (MAX_BYTES + 1), "larger than 16 MiB"),
    ],
)
def test_foreign_cards_are_refused(content: bytes, reason: str, bundle: Path) -> None:
    (bundle / "covpool.json").write_bytes(content)
    assert_refused(bundle, reason)


class Intruder:
    """An object whose unpickling writes a file."""

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


def test_newer_format_says_what_to_install(bundle: Path) -> None:
    # A newer format may use another hash, so the version is checked first.
    newer = {"format_version": 3, "written_by": "0.9.1'; rm -rf ~ #\x1b", "hash": "sha3:0"}
    edit_card(bundle, lambda fields: fields.update(newer), rehash=False)
    here = f"this covpool {re.escape(covpool.__version__)} reads up to format 1"
    assert_refused(
        bundle, rf"covpool \"0\.9\.1.*wrote it in bundle format 3; {here}: pip install --upgrade covpool$"
    )


def test_missing_things_are_named(bundle: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "there is no such folder")
    assert_refused(bundle / "covpool.json", "this is a file, not a folder")
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
    assert_refused(bundle, f"its {name} cannot be opened: not a regular file")
    (bundle / name).unlink()
    (bundle / name).symlink_to("/dev/zero")
    assert_refused(bundle, f"its {name} cannot be opened: not a regular file")


def test_a_link_to_a_secret_tells_nothing(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2: [")
    (bundle / "covpool.json").unlink()
    (bundle / "covpool.json").symlink_to(tmp_path / "secret")
    assert_refused(bundle, r"^(?!.*hunter2).*not JSON")
