"""A local server in place of the Hugging Face Hub."""

from tests.models.hub.conftest import hub

__all__ = ["hub"]
