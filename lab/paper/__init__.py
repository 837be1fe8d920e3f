"""The paper's claims next to the results of ``python -m lab reproduce``: ``python -m lab paper``."""
