"""The device of these tests, and a summary of the measurements on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from covpool.device import chosen_device, device_lines

MEASURED = pytest.StashKey[dict[str, str]]()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of ``--device``, with float32 products in full precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield chosen_device(request.config.getoption("--device"))
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Add a line to the summary."""
    return request.config.stash.setdefault(MEASURED, {}).__setitem__


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = config.stash.get(MEASURED, {})
    if not measured or config.getoption("--device") == "cpu":
        return
    terminalreporter.section("covpool on this device: paste it into an issue")
    terminalreporter.line(f"torch {torch.__version__}, {', '.join(device_lines())}")
    for name, value in measured.items():
        terminalreporter.line(f"{name:<34} {value}")
