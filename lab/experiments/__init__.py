"""One-off experiments whose results are committed, run from a checkout: see README.md."""
