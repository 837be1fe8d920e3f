"""Benchmarks of contenders against stated targets, run from a checkout: see README.md."""
