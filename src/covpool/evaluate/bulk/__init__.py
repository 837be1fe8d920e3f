"""Predictions and embeddings of any number of images, from ten to a billion, into whole files."""

from covpool.evaluate.bulk.infer import Done, infer
from covpool.evaluate.bulk.job import Files
from covpool.evaluate.bulk.tasks import Embed, Predict
from covpool.evaluate.bulk.work import Running

__all__ = ["Done", "Embed", "Files", "Predict", "Running", "infer"]
