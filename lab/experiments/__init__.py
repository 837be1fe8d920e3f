"""One experiment per file; ``python -m lab`` lists them."""
