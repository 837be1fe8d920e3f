"""Run networks over images: predictions, embeddings and features of any number of images."""

from covpool.inference.bulk import Done, Files, infer
from covpool.inference.tasks import Embed, Predict
from covpool.inference.work import Running

__all__ = ["Done", "Embed", "Files", "Predict", "Running", "infer"]
