"""Weights that others trained: files for a backbone, and the checkpoints of the paper's authors."""
