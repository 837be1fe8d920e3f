"""Explain predictions with exact evidence maps, and diagnose the covariances of a network."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.explain.diagnosis import Diagnosis, diagnose
    from covpool.explain.evidence import Evidence, evidence_maps

__all__ = ["Diagnosis", "Evidence", "diagnose", "evidence_maps"]

__getattr__ = lazily(
    __name__,
    "train",
    {
        "covpool.explain.diagnosis": "Diagnosis diagnose",
        "covpool.explain.evidence": "Evidence evidence_maps",
    },
)
