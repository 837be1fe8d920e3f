"""Linear classifiers on pooled vectors in closed form, from sums that add, subtract and merge."""
