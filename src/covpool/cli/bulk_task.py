"""What ``covpool predict`` and ``covpool embed`` share: a task on any number of images, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covpool.inference import Done, Embed, Predict


def run_task(arguments: Any, kind: type[Predict] | type[Embed]) -> Done:
    """Do it, or go on with it; ``arguments`` have the fields of the task's ``kind``."""
    from covpool.cli.parser import part_of
    from covpool.inference import Files, Running, infer
    from covpool.progress import Progress

    task, files = part_of(arguments, kind), part_of(arguments, Files)
    running = part_of(arguments, Running)
    with Progress("images") as progress:
        return infer(arguments.bundle, arguments.data, arguments.out, task, files, running, progress)


def text(result: Done) -> str:
    """What is there, and what of it is new."""
    from covpool.inference.bulk import report_text

    return report_text(result)
