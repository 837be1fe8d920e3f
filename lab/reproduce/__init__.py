"""Experiments whose results are committed under ``results/``: one file each."""
