"""Where images without labels come from: one file for each kind of input."""

from covpool.evaluate.bulk.inputs.kinds import open_input

__all__ = ["open_input"]
