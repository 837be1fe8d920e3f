"""Explain predictions with exact evidence maps, and diagnose the covariances of a network."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.explain.diagnosis import Diagnosis, diagnose
    from covpool.explain.evidence import Evidence, explain

__all__ = ["Diagnosis", "Evidence", "diagnose", "explain"]

__getattr__ = lazily(__name__, "train", __file__)
