"""The server that stands for the Hugging Face Hub."""

from tests.models.hub.conftest import hub

__all__ = ["hub"]
