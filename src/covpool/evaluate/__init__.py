"""Evaluate trained networks: accuracy, retrieval, linear SVMs, and heads on a frozen backbone."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.evaluate.accuracy import Evaluation, evaluate
    from covpool.evaluate.probe import Probed, ProbeOptions
    from covpool.evaluate.retrieval import Retrieval, retrieve
    from covpool.evaluate.svm import Passing, SVMReport, fit_svm

__all__ = [
    "Evaluation",
    "Passing",
    "ProbeOptions",
    "Probed",
    "Retrieval",
    "SVMReport",
    "evaluate",
    "fit_svm",
    "retrieve",
]

__getattr__ = lazily(__name__, "eval", __file__)
