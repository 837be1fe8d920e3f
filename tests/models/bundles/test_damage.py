"""What is cut short, changed or of another bundle is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from covpool.errors import BundleError
from covpool.models import PooledClassifier
from covpool.models import card as card_module
from covpool.models.bundle import load_model, save_model
from tests.models.bundles.judging import assert_not_loaded, assert_refused
from tests.models.bundles.samples import CLASSES, edit_card, put_weights


def test_weights_cut_short_are_refused(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    for sixteenth in range(16):
        (bundle / "model.safetensors").write_bytes(data[: sixteenth * len(data) // 16])
        assert_refused(bundle, rf"cut short, \d+ bytes of {len(data)}: copy it anew")
    (bundle / "model.safetensors").write_bytes(data + b"\0")
    assert_refused(bundle, "do not belong together")


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
    for place in range(len(data) - 1):  # the last is the end of the line, and says nothing
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << place % 8
        # Between tokens one space is as good as another.
        if data[place : place + 1].isspace() and spoilt[place : place + 1].isspace():
            continue
        with pytest.raises(BundleError):
            card_module.read_fields(bytes(spoilt))


def test_every_cut_of_the_card_is_found(saved: Path) -> None:
    data = (saved / "covpool.json").read_bytes()
    card_module.read_fields(data)
    for length in range(len(data.rstrip())):
        with pytest.raises(BundleError, match="cut short or not JSON"):
            card_module.read_fields(data[:length])


def test_edited_class_is_found(bundle: Path) -> None:
    edit_card(bundle, lambda fields: fields["classes"].__setitem__(0, "Crow"), rehash=False)
    assert_refused(bundle, "edited after it was written")


def test_reformatted_card_is_the_same_card(bundle: Path) -> None:
    edit_card(bundle, lambda fields: None, rehash=False)
    assert load_model(bundle).classes == CLASSES


def test_weights_of_another_bundle_are_refused(bundle: Path, other: PooledClassifier) -> None:
    folder = save_model(other, bundle.parent / "other")
    shutil.copy(folder / "model.safetensors", bundle)
    assert_refused(bundle, "not the one of this card")
