"""Check whether covpool works on this machine: installed packages, and a self-test of at most 30 seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from covpool.device import chosen_device, device_lines
from covpool.doctor import checks
from covpool.doctor.checks import Finding, NotHereError, missing_by_extra, versions
from covpool.provenance import describe_machine
from covpool.terminal import counted

Progress = Callable[[str, int, int], None]
REINSTALL = "reinstall torch, for this CPU and driver: https://pytorch.org/get-started"


@dataclass(frozen=True)
class Examination:
    """The result of an examination.

    Attributes:
        versions: of Python, covpool and the installed packages.
        machine: description of the machine, as in results.
        devices: devices of torch.
        float32_products: torch's precision of float32 matrix products; ``highest`` is without TF32.
        missing: missing packages of each extra.
        findings: results of the tests.
    """

    versions: dict[str, str]
    machine: dict[str, Any]
    devices: tuple[str, ...]
    float32_products: str
    missing: dict[str, tuple[str, ...]]
    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether no test failed."""
        return all(finding.state != "fail" for finding in self.findings)


def examine(progress: Progress = lambda what, done, total: None) -> Examination:
    """Examine the installed packages, and test them without downloads.

    Example:
        >>> from covpool.doctor import examine
        >>> examine().is_well  # doctest: +SKIP
        True
    """
    device = chosen_device().type
    tests = _tests(device)
    findings = []
    for number, test in enumerate(tests):
        progress(f"tests: {test.name}", number, len(tests))
        findings.append(_finding(test))
    return Examination(
        versions=versions(),
        machine=describe_machine("cpu"),
        devices=device_lines(),
        float32_products=torch.get_float32_matmul_precision(),
        missing=missing_by_extra(),
        findings=tuple(findings),
    )


def examination_text(examination: Examination) -> str:
    """Return the installed packages, a line per test, and the verdict as text."""
    rows = [("versions", ", ".join(f"{name} {version}" for name, version in examination.versions.items()))]
    rows += [("processor", _processor(examination)), ("devices", ", ".join(examination.devices))]
    tf32 = "off" if examination.float32_products == "highest" else "on"
    rows += [("float32", f"matrix products of precision {examination.float32_products}: TF32 is {tf32}")]
    whole = [extra for extra, missing in examination.missing.items() if not missing]
    rows += [("extras", ", ".join(whole) or "none")]
    lines = [f"{name:<11}{value}" for name, value in rows]
    lines += [
        f"{'':<11}missing: {extra} ({', '.join(missing)}): pip install 'covpool[{extra}]'"
        for extra, missing in examination.missing.items()
        if missing
    ]
    lines.append("")
    width = max(len(finding.name) for finding in examination.findings)
    for finding in examination.findings:
        remedy = f": {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.state}  {finding.name.ljust(width)}  {finding.detail}{remedy}")
    failed = [finding.name for finding in examination.findings if finding.state == "fail"]
    verdict = f"failed: {', '.join(failed)}" if failed else "no problems found"
    return "\n".join([*lines, "", verdict])


class Trial(NamedTuple):
    """A test, and what to do if it fails; ``is_needed`` is false for optional features."""

    name: str
    run: Callable[[], str]
    remedy: str
    is_needed: bool = True


def _processor(examination: Examination) -> str:
    machine = examination.machine
    counts = [counted(machine["cores"], "core"), counted(machine["threads"], "thread")]
    memory = [f"{machine['memory_gib']} GiB"] if machine["memory_gib"] else []
    amx = "AMX" if "amx_tile" in machine["flags"] else "no AMX"
    return ", ".join([machine["cpu"], *counts, *memory, machine["capability"], amx])


def _tests(device: str) -> list[Trial]:
    """Test the GPU if there is one, because training uses it."""
    return [
        Trial(f"isqrt_cov on {device}", partial(checks.value, device), REINSTALL),
        Trial(f"gradient on {device}", partial(checks.gradient, device), REINSTALL),
        Trial(f"bfloat16 on {device}", partial(checks.half_precision, device), REINSTALL, False),
        Trial(
            "torch.compile",
            partial(checks.compiled, device),
            "install a C++ compiler such as g++, or do without: torch.compile is optional",
            is_needed=False,
        ),
        Trial(f"training on {device}", partial(checks.training_step, device), REINSTALL),
        Trial("images", checks.image, "pip install --force-reinstall pillow torchvision"),
        Trial(
            "worker processes",
            checks.workers,
            "use --workers 0, or more shared memory: docker run --shm-size=8g",
        ),
        Trial("disk", checks.disk, "free space there, or set TMPDIR to a folder on another disk"),
    ]


def _finding(test: Trial) -> Finding:
    try:
        return Finding(test.name, "pass", test.run())
    except NotHereError as error:
        return Finding(test.name, "skip", str(error), error.remedy)
    except Exception as error:  # the purpose is to report any error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Finding(test.name, "fail" if test.is_needed else "skip", lines[0], test.remedy)


__all__ = ["Examination", "Finding", "examine"]
