"""The claims of the paper, and verdicts on them from the results: ``python -m lab paper``."""
