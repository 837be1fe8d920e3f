"""What is told of a CPU that takes longer in fewer bits."""

from __future__ import annotations

import logging

import pytest
import torch

from covpool import processes as precision

CPU = torch.device("cpu")


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
def test_emulated_bfloat16_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: list[str],
    wanted: str,
    warnings: int,
    fastest: str,
) -> None:
    monkeypatch.setattr(precision, "describe_machine", lambda device: {"flags": flags})
    precision._warn_of_emulation.cache_clear()
    with caplog.at_level(logging.WARNING, "covpool"):
        for _ in range(2):
            assert precision.autocast(CPU, wanted).fast_dtype in (torch.bfloat16, torch.float32)
    assert caplog.text.count("float32 is several times as fast") == warnings
    assert precision.fastest_precision() == fastest
    precision._warn_of_emulation.cache_clear()
