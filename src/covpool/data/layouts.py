"""The sources of images by name, in a module that imports nothing, for the options of commands."""

from typing import TYPE_CHECKING, Literal

# The module or object of each source. The first that recognizes a path opens it.
SOURCES = {
    "csv": "covpool.data.sources.csv",
    "shards": "covpool.data.sources.shards",
    "cub": "covpool.data.sources.benchmarks:cub",
    "aircraft": "covpool.data.sources.benchmarks:aircraft",
    "cars": "covpool.data.sources.benchmarks:cars",
    "parquet": "covpool.data.sources.parquet",
    "folder": "covpool.data.sources.folder",
}

if TYPE_CHECKING:
    Layout = str
else:
    Layout = Literal[("auto", *SOURCES)]
