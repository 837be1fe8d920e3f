"""Run networks over images: predictions, embeddings and features of any number of images."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.inference.bulk import Done, infer
    from covpool.inference.options import Embed, Files, Predict, Running

__all__ = ["Done", "Embed", "Files", "Predict", "Running", "infer"]

__getattr__ = lazily(
    __name__,
    "eval",
    {
        "covpool.inference.bulk": "Done infer",
        "covpool.inference.options": "Embed Files Predict Running",
    },
)
