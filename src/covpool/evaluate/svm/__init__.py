"""Linear SVMs on a trained network's features, as in the fine-grained protocol."""

from covpool.evaluate.svm.classifier import Passing
from covpool.evaluate.svm.protocol import SVMReport, fit_svm

__all__ = ["Passing", "SVMReport", "fit_svm"]
