"""The images of a run that could not be used: each is named once, and too many of them end the run."""

from __future__ import annotations

from collections.abc import Iterable

from covpool.data.batch import BadImage
from covpool.train.processes import Processes
from covpool.train.run_folder import RunFolder


class TrainingError(ValueError):
    """Why training cannot go on, in a sentence."""


class NotFiniteError(TrainingError):
    """Too many losses or gradients were not finite."""


class BadImages:
    """What ``bad_images.csv`` lists, in every process.

    Args:
        folder: of the run, which may have been begun before.
        processes: that train together.
        most: how many there may be.
    """

    def __init__(self, folder: RunFolder, processes: Processes, most: int) -> None:
        self.folder, self.processes, self.most = folder, processes, most
        self._found = {image.name: image for image in processes.by_first(folder.read_bad_images)}

    def __len__(self) -> int:
        return len(self._found)

    def note(self, images: Iterable[BadImage]) -> None:
        """Write down those that are new; every process has to know of the same ones.

        Raises:
            TrainingError: if there are too many now.
        """
        new = {image.name: image for image in images if image.name not in self._found}
        if new:
            self._found |= new
            self.processes.by_first(lambda: self.folder.write_bad_images(list(self._found.values())))
        if len(self) > self.most:
            self.processes.fail(
                TrainingError(
                    f"{len(self)} images could not be used, more than --max-bad {self.most}: "
                    f"{self.folder.path / 'bad_images.csv'} lists them"
                )
            )
