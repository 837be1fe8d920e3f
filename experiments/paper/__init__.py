"""The paper's claims next to the results of ``covpool reproduce``: ``python -m experiments.paper``."""
