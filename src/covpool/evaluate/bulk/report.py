"""What a job did, for a person."""

from __future__ import annotations

from covpool.data.counts import counted
from covpool.evaluate.bulk.infer import Done
from covpool.train.durations import duration


def report_text(done: Done) -> str:
    """A line on what is there, and one on the bad images among what is new."""
    files = counted(done.files, "file")
    there = f"{done.out}: {counted(done.images, 'row')} in {files}"
    if not done.new_files:
        return f"{there}, all of them there already"
    rate = done.new_images / max(done.seconds, 1e-9)
    new = "" if done.new_images == done.images else f", {done.new_images:,} of them new"
    lines = [f"{there}{new}, in {duration(done.seconds)} ({rate:,.0f} images a second)"]
    if done.bad_images:
        lines.append(f"bad images: {done.bad_images:,} of the new ones; the column error says why")
    return "\n".join(lines)
