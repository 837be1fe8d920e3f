"""Small versions of the networks of the paper's tables and figures: ``python -m lab reproduce``."""
