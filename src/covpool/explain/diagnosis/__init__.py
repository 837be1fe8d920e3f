"""What a network's covariances are like on images: ``covpool diagnose``."""

from covpool.explain.diagnosis.measuring import Diagnosis, diagnose
from covpool.explain.diagnosis.words import warnings

__all__ = ["Diagnosis", "diagnose", "warnings"]
