"""Evaluate trained networks: accuracy, retrieval, linear SVMs, and heads on a frozen backbone."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.evaluate.accuracy import Evaluation, measure_accuracy
    from covpool.evaluate.probe.options import ProbeOptions
    from covpool.evaluate.probe.probing import Probed
    from covpool.evaluate.retrieval import Retrieval, retrieve
    from covpool.evaluate.svm import Passing, SVMReport, fit_svm

__all__ = [
    "Evaluation",
    "Passing",
    "ProbeOptions",
    "Probed",
    "Retrieval",
    "SVMReport",
    "fit_svm",
    "measure_accuracy",
    "retrieve",
]

__getattr__ = lazily(
    __name__,
    "eval",
    {
        "covpool.evaluate.accuracy": "Evaluation measure_accuracy",
        "covpool.evaluate.probe.options": "ProbeOptions",
        "covpool.evaluate.probe.probing": "Probed",
        "covpool.evaluate.retrieval": "Retrieval retrieve",
        "covpool.evaluate.svm": "Passing SVMReport fit_svm",
    },
)
