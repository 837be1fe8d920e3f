"""DDP and FSDP2 on two gloo processes match one process on the complete batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.functional.tolerances import assert_close
from tests.nn import two_processes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Tensor]]:
    # Starting two processes takes most of the time, so they train every case.
    folder: Path = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.start_processes(two_processes.run, (str(folder),), nprocs=2, start_method="fork")
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.mark.parametrize("case", [case for case in two_processes.CASES if case != "dropcov"])
@pytest.mark.parametrize("wrapper", two_processes.WRAPPERS)
def test_two_processes_train_as_one(results, wrapper: str, case: str) -> None:
    one = two_processes.train(two_processes.make_model(case), two_processes.make_batches(case))
    two = results[wrapper, case]
    assert two.keys() == one.keys()
    for name in one:
        # Gradients that are zero in exact arithmetic contain only rounding errors.
        size = max(one[name].abs().max().item(), 1e-3)
        torch.testing.assert_close(two[name], one[name], rtol=0.0, atol=1e-11 * size, msg=name)


@pytest.mark.parametrize("wrapper", two_processes.WRAPPERS)
def test_two_processes_train_with_chance(results, wrapper: str) -> None:
    """DropCov draws different channels on every process, so no single process trains the same."""
    before = dict(two_processes.make_model("dropcov").named_parameters())
    for name, tensor in results[wrapper, "dropcov"].items():
        assert tensor.isfinite().all()
        if not name.endswith(".grad"):
            assert not torch.equal(tensor, before[name])


def test_training_moves_the_weights() -> None:
    case = "map"
    before = dict(two_processes.make_model(case).named_parameters())
    after = two_processes.train(two_processes.make_model(case), two_processes.make_batches(case))
    with pytest.raises(AssertionError):
        assert_close(after["0.reduction.projection.weight"], before["0.reduction.projection.weight"].detach())
