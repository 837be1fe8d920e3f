"""Output and errors of several processes that train together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from covpool.errors import LostProcessError
from covpool.processes import joined_processes

WARNING = """
import logging
from covpool.processes import joined_processes
with joined_processes("cpu") as processes:
    logging.getLogger("covpool").warning("few images")
    processes.gather(None)
logging.getLogger("covpool").warning("good-bye")
"""


@pytest.mark.slow
def test_a_warning_is_heard_once(tmp_path: Path) -> None:
    script = tmp_path / "warn.py"
    script.write_text(WARNING)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("few images") == 1
    assert run.stderr.count("good-bye") == 2  # logging is as before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("[gloo/transport/tcp/pair.cc] Connection closed by peer", LostProcessError),
        ("Application timeout caused pair closure", LostProcessError),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
    ],
)
def test_errors_of_a_lost_process_are_recognized(
    words: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    stores = [(dist.HashStore(), 0, 1)]  # type: ignore[attr-defined]
    monkeypatch.setattr("covpool.processes.rendezvous", lambda url, **options: iter(stores))
    with pytest.raises((LostProcessError, RuntimeError)) as caught, joined_processes("cpu"):
        raise RuntimeError(words)
    assert type(caught.value) is expected
