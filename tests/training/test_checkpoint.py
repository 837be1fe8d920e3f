from __future__ import annotations

import logging
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covpool.errors import DamagedCheckpointError
from covpool.processes import ALONE
from covpool.storage.manifest import Manifest, part_of
from covpool.training.checkpoint import (
    Checkpoint,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
    set_aside_newer,
    shared_checkpoint,
    write_checkpoint,
)


def checkpoint(step: int) -> Checkpoint:
    torch.manual_seed(step)
    tensors = {
        "model": {"weight": torch.randn(8, 4), "count": torch.tensor(step)},
        "optimizer": {"weight|momentum_buffer": torch.randn(4, 8).t()},  # not contiguous
    }
    return Checkpoint(step, tensors, {"loss": 0.1 + step, "history": [{"top1": 0.5}], "best": None})


def assert_equal(found: Checkpoint | None, wanted: Checkpoint) -> None:
    assert found is not None
    assert (found.step, found.state) == (wanted.step, wanted.state)
    assert found.tensors.keys() == wanted.tensors.keys()
    for part, tensors in wanted.tensors.items():
        assert found.tensors[part].keys() == tensors.keys()
        assert all(torch.equal(found.tensors[part][name], tensor) for name, tensor in tensors.items())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(7))
    assert path.name == "step-00000007"
    assert_equal(read_checkpoint(path), checkpoint(7))
    assert {file.name for file in path.iterdir()} == {
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None
    assert newest_checkpoint(tmp_path) is None


def damages(path: Path) -> list[tuple[str, bytes]]:
    """Return each file truncated at every sixteenth of its length, and with single bytes changed."""
    found = []
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        found += [(file.name, data[: len(data) * part // 16]) for part in range(16)]
        for place in range(0, len(data), max(1, len(data) // 16)):
            changed = bytearray(data)
            changed[place] ^= 1
            found.append((file.name, bytes(changed)))
        found.append((file.name, data + b" "))
    return found


def test_a_damaged_checkpoint_is_never_loaded_but_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    path = write_checkpoint(tmp_path, checkpoint(2))
    tried = damages(path)
    assert len(tried) > 4 * 32
    for name, data in tried:
        whole = (path / name).read_bytes()
        (path / name).write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "covpool"):
            assert_equal(newest_checkpoint(tmp_path), checkpoint(1))
        assert str(path) in caplog.text
        assert "the checkpoint before it" in caplog.text
        (path / name).write_bytes(whole)
    assert_equal(newest_checkpoint(tmp_path), checkpoint(2))


def test_damaged_rows_of_a_divided_classifier_are_never_loaded(tmp_path: Path) -> None:
    rows = range(4)
    for step in (1, 2):
        whole = replace(checkpoint(step), rows={"model/head": torch.full((4, 2), float(step))})
        path = write_checkpoint(tmp_path, whole, rows=rows)
    (file,) = path.glob("rows-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = shared_checkpoint(tmp_path, ALONE, rows)
    assert found is not None
    assert found.step == 1
    assert torch.equal(found.rows["model/head"], torch.ones(4, 2))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_a_checkpoint_without_one_of_its_files_is_not_loaded(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    (write_checkpoint(tmp_path, checkpoint(2)) / name).unlink()
    assert_equal(newest_checkpoint(tmp_path), checkpoint(1))


def test_if_none_is_whole_it_is_told_not_begun_anew(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, checkpoint(1)) / "state.json").write_bytes(b"{}")
    with pytest.raises(DamagedCheckpointError, match="remove them all to start again"):
        newest_checkpoint(tmp_path)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_the_name_and_hash_of_tensors_runs_nothing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1))
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    (path / "model.safetensors").write_bytes(bomb)
    parts = Manifest.read((path / "manifest.json").read_bytes()).parts
    written = Manifest({**parts, "model.safetensors": part_of(bomb)}).written()
    (path / "manifest.json").write_bytes(written)
    with pytest.raises(DamagedCheckpointError, match="step-00000001: Error while deserializing"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret", "secret\0"])
def test_a_manifest_names_only_plain_files(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1))
    (tmp_path / "secret").write_bytes(b"x")
    parts = Manifest.read((path / "manifest.json").read_bytes()).parts
    (path / "manifest.json").write_bytes(Manifest({**parts, name: part_of(b"x")}).written())
    with pytest.raises(DamagedCheckpointError, match=re.escape(f"names {name!r}")):
        read_checkpoint(path)


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        write_checkpoint(tmp_path, checkpoint(step))
    remove_old_checkpoints(tmp_path, keep=2, best_step=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    write_checkpoint(tmp_path, checkpoint(100_000_000))
    assert newest_checkpoint(tmp_path).step == 100_000_000  # type: ignore[union-attr]


def test_a_damaged_one_does_not_count_among_the_last(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, checkpoint(step))
    (tmp_path / "step-00000002" / "state.json").write_bytes(b"{}")
    found = newest_checkpoint(tmp_path)
    assert_equal(found, checkpoint(1))
    set_aside_newer(tmp_path, step=1)
    write_checkpoint(tmp_path, checkpoint(2))
    remove_old_checkpoints(tmp_path, keep=1, best_step=None)
    assert_equal(newest_checkpoint(tmp_path), checkpoint(2))


def test_what_a_kill_leaves_beside_is_no_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    (tmp_path / ".step-00000002.covpool-saving-0a").mkdir()
    (tmp_path / "step-2-copy").mkdir()
    assert_equal(newest_checkpoint(tmp_path), checkpoint(1))
