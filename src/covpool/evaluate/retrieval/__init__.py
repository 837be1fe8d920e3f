"""Whether images of a class lie together: what a search by a bundle's vectors finds."""

from covpool.evaluate.retrieval.retrieval import Retrieval, retrieve

__all__ = ["Retrieval", "retrieve"]
