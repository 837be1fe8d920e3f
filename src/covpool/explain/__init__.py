"""Why a network says what it says: exact maps over places, and what its covariances look like."""

from covpool.explain.evidence import Evidence, explain

__all__ = ["Evidence", "explain"]
