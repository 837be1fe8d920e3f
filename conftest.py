"""Setup shared by the tests and by the doctests of src/ and lab/."""

from pathlib import Path

import pytest
import torch

import covpool

# pytest-xdist workers share the cores. With torch's default, each worker would start one thread per core.
torch.set_num_threads(1)

# The sdist contains the tests, but not lab.
collect_ignore = [] if (Path(__file__).parent / "lab").is_dir() else ["tests/lab"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``, the device for ``tests/device``. All other tests run on the CPU."""
    parser.addoption("--device", default="cpu", help="device of tests/device: cpu, cuda, mps, xpu or auto")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["torch"] = torch
    doctest_namespace["covpool"] = covpool
