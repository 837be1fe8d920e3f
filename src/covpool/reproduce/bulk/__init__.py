"""What a billion images take: rates measured on one core, and the arithmetic on them.

    python -m covpool.reproduce.bulk PHOTOS results/VERSION/bulk--MACHINE--cpu

measures on photographs in a folder and writes a JSON and its tables, which docs/scale.md shows.
"""

from covpool.reproduce.bulk.arithmetic import table
from covpool.reproduce.bulk.rates import run

__all__ = ["run", "table"]
