"""Measure time and memory of pooling methods, of ``isqrt_cov``, of training and of the divided classifier."""
