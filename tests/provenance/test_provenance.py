from __future__ import annotations

import pytest

from covpool.provenance import describe_machine, machine_name, release


@pytest.mark.parametrize(
    ("cpu", "flags", "cores", "name"),
    [
        ("Intel(R) Xeon(R) Processor", ["amx_tile"], 2, "xeon-amx-2c"),
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", [], 8, "xeon-platinum-8375c-8c"),
        ("AMD EPYC 7763 64-Core Processor", [], 4, "epyc-7763-4c"),
        ("13th Gen Intel(R) Core(TM) i7-13700K", [], 16, "13th-gen-core-i7-13700k-16c"),
        ("arm", [], 8, "arm-8c"),
        ("", [], 1, "cpu-1c"),
    ],
)
def test_cpu_names_are_short(cpu: str, flags: list[str], cores: int, name: str) -> None:
    assert machine_name({"cpu": cpu, "flags": flags, "cores": cores, "threads": cores, "gpu": None}) == name


def test_a_machine_held_to_fewer_threads_is_named_after_them() -> None:
    machine = {"cpu": "Xeon", "flags": [], "cores": 2, "threads": 1, "gpu": None}
    assert machine_name(machine) == "xeon-1c"


def test_gpu_gives_its_name() -> None:
    machine = {"cpu": "arm", "flags": [], "cores": 8, "gpu": "NVIDIA A100-SXM4-80GB"}
    assert machine_name(machine) == "nvidia-a100-sxm4-80gb"


def test_this_machine_is_described() -> None:
    machine = describe_machine("cpu")
    assert machine["cores"] >= 1
    assert machine["threads"] >= 1
    assert machine["gpu"] is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.0", "0.1.0"), ("0.1.0.dev0", "0.1.0"), ("1.2.3.dev45+gabc", "1.2.3"), ("0.2.0rc1", "0.2.0")],
)
def test_the_release_a_version_leads_to(version: str, expected: str) -> None:
    assert release(version) == expected


def test_what_has_no_number_is_no_version() -> None:
    with pytest.raises(ValueError, match="begins with a number"):
        release("unknown")
