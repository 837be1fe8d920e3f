"""Benchmarks, experiments and figures, run from a checkout: ``python -m lab``."""
