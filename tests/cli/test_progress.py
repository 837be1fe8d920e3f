"""A bar on a terminal, lines in a log, and neither more often than it is time."""

from __future__ import annotations

import io

import pytest

from covpool.cli import progress
from covpool.cli.progress import NamedProgress, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def test_on_a_terminal(clock: list[float]) -> None:
    with Progress("images", stream := Terminal()) as tell:
        for done, now in ((10, 100.05), (20, 101.0), (21, 101.05), (50, 102.5)):
            clock.append(now)
            tell(done, 100)
    assert stream.getvalue() == (
        "\r[######                        ] 20 of 100 images, 4 s left\x1b[K"
        "\r[###############               ] 50 of 100 images, 2 s left\x1b[K"
        "\r\x1b[K"
    )


def test_in_a_log(clock: list[float]) -> None:
    with Progress("images", stream := io.StringIO()) as tell:
        for done, now in ((10, 101.0), (2000, 140.0), (2010, 141.0), (10_000, 1_000_000.0)):
            clock.append(now)
            tell(done, 1_000_000)
    assert stream.getvalue() == (
        "2,000 of 1,000,000 images, 5 h 32 min left\n10,000 of 1,000,000 images, 27497 h 15 min left\n"
    )


def test_quick_work_leaves_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("images") as tell:
        tell(5, 5)
    assert capsys.readouterr() == ("", "")


def test_what_is_left_is_cleared_after_an_error() -> None:
    stream = Terminal()
    with pytest.raises(KeyError), Progress("images", stream):
        raise KeyError
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_sentence_has_a_line_of_its_own(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys, "stderr", stream := Terminal())
    with NamedProgress() as named:
        named("images", 0, 4)
        clock.append(102.0)
        named("images", 2, 4)
        named.tell("features take 1.00 MB")
    assert stream.getvalue() == (
        "\r[                              ] 0 of 4 images\x1b[K"
        "\r[###############               ] 2 of 4 images, 2 s left\x1b[K"
        "\r\x1b[Kfeatures take 1.00 MB\n\r\x1b[K"
    )


@pytest.mark.parametrize(("left", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3599.7, "1 h 0 min")])
def test_durations(left: float, text: str) -> None:
    assert progress.duration(left) == text
