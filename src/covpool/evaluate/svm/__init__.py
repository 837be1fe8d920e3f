"""Linear SVMs on a trained network's features, as the fine-grained protocol has it."""

from covpool.evaluate.svm.classifier import Passing
from covpool.evaluate.svm.protocol import SVMReport, fit_svm

__all__ = ["Passing", "SVMReport", "fit_svm"]
