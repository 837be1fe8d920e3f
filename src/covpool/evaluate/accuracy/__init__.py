"""How often a bundle is right, for which classes, how sure that is, and whether the bundle knows it."""

from covpool.evaluate.accuracy.evaluation import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
