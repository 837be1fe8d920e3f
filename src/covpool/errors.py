"""The errors that covpool raises on purpose. The command line prints them without a traceback, exit code 2.

Any other exception is a bug in covpool, and the command line shows its traceback.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal["unreadable", "truncated", "too large", "too slow", "format"]


class CovpoolError(Exception):
    """Something that the caller can change: an argument, a file, or the machine."""


class UsageError(CovpoolError, ValueError):
    """An argument, an option or a file has a wrong value."""


class UsageTypeError(CovpoolError, TypeError):
    """An argument has a wrong type."""


class StorageError(CovpoolError, OSError):
    """A file or a remote URL cannot be read or written."""


class TooLargeError(StorageError):
    """A file has more bytes than its kind may have."""


class UnreachableError(StorageError):
    """The URL or path of a row gives no answer, or the row may not name it; another try may succeed."""


# The operating system ends the process that takes most memory.
WORKER_DIED = (
    "a process that reads images was killed, perhaps because the memory was full: use fewer --workers, and "
    "rerun the command"
)


class DataError(UsageError):
    """The data set gives no more batches; the message says why."""


class ShardError(UsageError):
    """A whole set of images became unreadable, not one image of it."""


class BadImageError(UsageError):
    """An image cannot be decoded.

    Attributes:
        reason: ``"unreadable"``: not an image, or a broken one; ``"truncated"``: its end is missing;
            ``"too large"``: above the limit that keeps a small file from filling the memory; ``"too
            slow"``: its decoder missed a deadline; ``"format"``: a format that covpool does not read.
        sentence: the message.
    """

    def __init__(self, reason: Reason, sentence: str) -> None:
        # Both are arguments of the exception, so that it can be pickled by a worker process.
        super().__init__(reason, sentence)
        self.reason: Reason = reason
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence


class BundleError(UsageError):
    """A bundle is invalid; the message says which and why."""


class DamagedBundleError(BundleError):
    """A file of a bundle is truncated or altered; another copy of it may be valid."""


class HubError(StorageError):
    """The Hugging Face Hub does not give or take a model; the message says why."""


class CheckpointError(UsageError):
    """A weights file does not fit the network; the message lists the keys."""


class DamagedCheckpointError(UsageError):
    """A checkpoint of a training run is damaged; the message says which and why."""


class UnsupportedBackboneError(UsageError):
    """The network does not work with covariance pooling; the message says why."""


class KeepResolutionError(UsageError):
    """``keep_resolution=True`` is impossible: the last stage cannot run at stride 1; the message says why."""


class TrainingError(UsageError):
    """Training cannot continue; the message says why."""


class NotFiniteError(TrainingError):
    """Too many losses or gradients were not finite."""


class LostProcessError(CovpoolError):
    """Another process of the run, or its machine, does not answer."""


class OtherJobError(UsageError):
    """The output folder belongs to another job; the message says in what they differ."""


class ExportRefusedError(UsageError):
    """An exported file differs too much from the model; the message says by which figure."""


class ReportedByFirstError(CovpoolError):
    """All processes fail, and the first one prints why."""


class Interrupted(CovpoolError):  # noqa: N818  # not an error: nothing was lost
    """Training was interrupted and has written a checkpoint.

    Attributes:
        exit_code: 143 after SIGTERM, 130 after Ctrl-C, as in shells.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number
