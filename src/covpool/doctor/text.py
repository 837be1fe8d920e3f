"""An examination, for a person."""

from __future__ import annotations

from covpool.data.counts import counted
from covpool.doctor.examination import Examination


def examination_text(found: Examination) -> str:
    """What is here, a line for every test, and the verdict."""
    rows = [("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()))]
    rows += [("processor", _processor(found)), ("devices", ", ".join(found.devices))]
    is_exact = found.float32_products == "highest"
    rows += [
        ("float32", f"products of precision {found.float32_products}: TF32 is {'off' if is_exact else 'on'}")
    ]
    whole = [extra for extra, missing in found.missing.items() if not missing]
    rows += [("extras", ", ".join(whole) or "none")]
    lines = [f"{name:<11}{value}" for name, value in rows]
    lines += [
        f"{'':<11}not {extra} ({', '.join(missing)}): pip install 'covpool[{extra}]'"
        for extra, missing in found.missing.items()
        if missing
    ]
    lines.append("")
    width = max(len(finding.name) for finding in found.findings)
    for finding in found.findings:
        remedy = f": {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.state}  {finding.name.ljust(width)}  {finding.told}{remedy}")
    return "\n".join([*lines, "", _verdict(found)])


def _processor(found: Examination) -> str:
    machine = found.machine
    counts = [counted(machine["cores"], "core"), counted(machine["threads"], "thread")]
    memory = [f"{machine['memory_gib']} GiB"] if machine["memory_gib"] else []
    amx = "AMX" if "amx_tile" in machine["flags"] else "no AMX"
    return ", ".join([machine["cpu"], *counts, *memory, machine["capability"], amx])


def _verdict(found: Examination) -> str:
    failed = [finding.name for finding in found.findings if finding.state == "fail"]
    return f"failed: {', '.join(failed)}" if failed else "all is well"
