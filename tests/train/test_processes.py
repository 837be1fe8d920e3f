"""Output of several processes that train together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
