"""The one function on a batch, which every engine runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.data.transforms import Preprocessing
from covpool.evaluate.bulk.decode import Batch, Decoder
from covpool.evaluate.bulk.tasks import Columns, Task
from covpool.models.bundles import load_model, read_card
from covpool.train.precision import autocast

# The error of a row whose numbers would say nothing.
NOT_FINITE = "not finite: the numbers of this image are too large for their type, or no numbers at all"


class Predictor:
    """From a batch of pixels to rows; ``ray.data.Dataset.map_batches`` takes it as it is.

    Args:
        bundle: the folder of a model.
        task: what is wanted.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
        sha256: of the weights that are meant. A process may be started long after the job, and a bundle be
            replaced meanwhile.
    """

    def __init__(
        self, bundle: str | Path, task: Task, device: str = "auto", sha256: str | None = None
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch sees no GPU here: pass cpu")
        self.device, self.task = torch.device(device), task
        model = load_model(bundle, device=self.device)
        if sha256 is not None and read_card(bundle).sha256 != sha256:
            raise ValueError(f"{bundle} is not the bundle any more that the job began with")
        self.decoder = Decoder(Preprocessing.of(model.pretrained_cfg))
        # Convolutions are quicker where the channels of a pixel lie together.
        self.outputs = task.start(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]

    def __call__(self, batch: Batch) -> Columns:
        """The rows of a batch.

        Args:
            batch: as :meth:`covpool.evaluate.bulk.decode.Decoder.batch` makes it.

        Returns:
            ``id``, the columns of the task, and ``error``, which is ``""`` where there was none.
        """
        good = np.flatnonzero(batch["error"] == "")
        columns, errors = self.outputs.empty(len(batch["id"])), batch["error"].copy()
        if len(good):
            pixels = torch.as_tensor(batch["image"][good])
            made = self.outputs.columns(self._vectors(pixels))
            finite = _finite_rows(made, len(good))
            errors[good[~finite]] = NOT_FINITE
            for name, values in made.items():
                columns[name][good[finite]] = values[finite]
        return {"id": batch["id"], **columns, "error": errors}

    @torch.inference_mode()
    def _vectors(self, pixels: Tensor) -> Tensor:
        images = self.decoder.floats(pixels.to(self.device, non_blocking=True))
        images = images.contiguous(memory_format=torch.channels_last)
        with autocast(self.device, self.task.precision):
            vectors = self.outputs.forward(images).float()
            if self.task.flip:
                vectors = (vectors + self.outputs.forward(images.flip(-1)).float()) / 2
        return vectors


def _finite_rows(columns: Columns, count: int) -> NDArray[np.bool_]:
    """Which rows have none but finite numbers."""
    finite = np.ones(count, dtype=bool)
    for values in columns.values():
        if values.dtype.kind == "f":
            finite &= np.isfinite(values.reshape(count, -1)).all(axis=1)
    return finite
