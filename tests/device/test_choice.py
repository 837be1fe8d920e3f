"""The choice of the device, with a simulated accelerator."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import covpool
import covpool.doctor as examination
from covpool import device as devices
from covpool.arguments import DEVICES
from covpool.device import (
    accelerator,
    autocast,
    chosen_device,
    device_lines,
    forked_rng,
    has_float64,
    pins_memory,
    timed,
)
from covpool.errors import UsageError
from covpool.functional import eigen, matrix_power
from covpool.processes import joined_processes

KINDS = ("cuda", "mps", "xpu")


@pytest.fixture(params=KINDS)
def pretended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two simulated accelerators of one kind, which have properties but cannot compute."""
    kind: str = request.param
    calls: list[Any] = []

    def found(check_available: bool = False) -> torch.device:
        return torch.device(kind)

    module = SimpleNamespace(
        calls=calls,
        is_initialized=lambda: False,
        device_count=lambda: 2,
        get_rng_state=lambda device: calls.append(("state", device)) or torch.zeros(1),
        set_rng_state=lambda state, device: calls.append(("restored", device)),
    )
    if kind != "mps":
        module.get_device_name = lambda index: f"Example {kind.upper()} {index}"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: calls.append(("set", index)))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=False), raising=False
    )
    return kind


def calls() -> list[Any]:
    module: Any = torch.get_device_module("any")
    return list(module.calls)


@pytest.fixture
def _nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def test_only_one_module_names_a_kind_of_gpu() -> None:
    source = Path(covpool.__file__).parent
    found = {
        path.name for path in source.rglob("*.py") if re.search(r"\b(cuda|nccl)\b", path.read_text("utf-8"))
    }
    # The kinds, the choices of --device, and the word that may be meant by gpu.
    assert found == {"device.py", "arguments.py", "terminal.py"}


@pytest.mark.usefixtures("_nothing")
def test_without_an_accelerator_auto_is_the_cpu() -> None:
    assert accelerator() is None
    assert chosen_device() == torch.device("cpu")
    assert device_lines() == ("cpu",)
    assert not pins_memory()
    for kind in KINDS:
        with pytest.raises(UsageError, match=f"^device is {kind}, but torch sees no GPU here: pass cpu$"):
            chosen_device(kind)


def test_auto_is_the_accelerator(pretended: str) -> None:
    assert chosen_device() == torch.device(pretended)
    assert chosen_device("auto", 1) == torch.device(pretended, 1)
    assert chosen_device(f"{pretended}:1") == torch.device(pretended, 1)
    assert chosen_device("cpu") == torch.device("cpu")
    assert pins_memory() == (pretended != "mps")
    assert has_float64(torch.device(pretended)) == (pretended == "cuda")


def test_an_accelerator_of_another_kind(pretended: str) -> None:
    other = KINDS[KINDS.index(pretended) - 1]
    sentence = f"^device is {other}, but torch sees {pretended} here: pass {pretended}$"
    with pytest.raises(UsageError, match=sentence):
        chosen_device(other)
    with pytest.raises(
        UsageError, match=f"^device is {pretended}:2, but torch sees 2 here, numbered from 0$"
    ):
        chosen_device("auto", 2)


def test_a_word_that_is_no_device() -> None:
    with pytest.raises(UsageError, match=f"^device must be one of {', '.join(DEVICES)}; got 'gpu'$"):
        chosen_device("gpu")


def test_doctor_lists_it(pretended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(examination, "_tests", lambda device: asked.append(device) or [])
    found = examination.examine()
    assert asked == [pretended]
    lines = {
        "cuda": "cuda:1 Example CUDA 1",
        "mps": "mps:1 Apple GPU (no float64: sums in float32; no eigh: on the CPU)",
        "xpu": "xpu:1 Example XPU 1 (no float64: sums in float32)",
    }
    assert len(found.devices) == 3
    assert found.devices[0] == "cpu"
    assert found.devices[2] == lines[pretended]


def test_a_process_of_torchrun_has_its_own(pretended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[str] = []
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    found = [(dist.HashStore(), 3, 4)]
    monkeypatch.setattr("covpool.processes.rendezvous", lambda url, **options: iter(found))
    monkeypatch.setattr("covpool.processes.LAST_EXCHANGE", 0)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: groups.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with joined_processes() as processes:
        assert processes.device == torch.device(pretended, 1)
    backend = {"cuda": "nccl", "xpu": "xccl", "mps": "gloo"}[pretended]
    assert groups == [f"cpu:gloo,{pretended}:{backend}"]
    assert ("set", 1) in calls()


def test_random_states_of_all_are_restored(pretended: str) -> None:
    with forked_rng(torch.device(pretended)):
        pass
    expected = [] if pretended == "mps" else [("state", 0), ("state", 1), ("restored", 0), ("restored", 1)]
    assert calls() == expected


def test_the_random_state_of_the_cpu_is_restored() -> None:
    before = torch.get_rng_state()
    with forked_rng(torch.device("cpu")):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_without_autocast_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    devices._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "covpool"):
        for _ in range(2):
            with autocast(torch.device("xpu"), "bfloat16"):
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert caplog.text.count("xpu has no bfloat16") == 1


def test_time_without_events_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: order.append("wait"))
    assert timed(lambda: order.append("run"), 2, "mps") >= 0
    assert order == ["wait", "run", "run", "wait"]
    assert timed(lambda: order.append("run"), 1, "cpu") >= 0
    assert order[4:] == ["run"]


def test_a_device_without_eigh_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device has no ``eigh``, so a copy on the CPU is decomposed."""
    asked: list[str] = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(eigen, "NO_EIGH", ("cpu",))
    monkeypatch.setattr(
        torch.Tensor,
        "cpu",
        lambda a: asked.append("copied") or monkeypatch.setattr(eigen, "NO_EIGH", ()) or real(a),
    )
    assert torch.allclose(matrix_power(torch.eye(3) * 4, 0.5), torch.eye(3) * 2)
    assert asked == ["copied"]


@pytest.mark.parametrize(
    ("flags", "wanted", "warnings", "fastest"),
    [
        (["avx2", "avx512f"], "bfloat16", 1, "float32"),
        (["avx2", "avx512f"], "float32", 0, "float32"),
        (["avx2", "avx512f", "avx512_bf16"], "bfloat16", 0, "float32"),
        (["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"], "bfloat16", 0, "bfloat16"),
        (["asimd"], "bfloat16", 0, "float32"),
    ],
)
def test_one_warning_of_emulated_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: list[str],
    wanted: str,
    warnings: int,
    fastest: str,
) -> None:
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))
    devices._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "covpool"):
        for _ in range(2):
            assert autocast(devices.CPU, wanted).fast_dtype in (torch.bfloat16, torch.float32)
    assert caplog.text.count("float32 is several times as fast") == warnings
    assert devices.fastest_precision() == fastest
    devices._warn.cache_clear()
