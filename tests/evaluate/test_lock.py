"""A lock is held by one process at a time, and ends with this process."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from covpool.storage.folders import held


def hold(folder: Path, is_held: Any) -> None:
    with held(folder):
        is_held.set()
        time.sleep(600)


def test_a_lock_keeps_others_out_until_its_process_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    other = context.Process(target=hold, args=(tmp_path / "new", is_held))
    other.start()
    assert is_held.wait(60)
    sentence = r"^another process is writing into .*new: let it finish$"
    with pytest.raises(ValueError, match=sentence), held(tmp_path / "new"):
        pass
    other.kill()
    other.join()
    for _ in range(2):  # also after it is released
        with held(tmp_path / "new"):
            pass
