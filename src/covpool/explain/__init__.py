"""Explain predictions with exact evidence maps, and diagnose the covariances of a network."""

from covpool.explain.evidence import Evidence, explain

__all__ = ["Evidence", "explain"]
