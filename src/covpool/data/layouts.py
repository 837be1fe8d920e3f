"""The sources of images by name, in a module that imports nothing, for the options of commands."""

from typing import TYPE_CHECKING, Literal

# The module of each source. The first that recognizes a path opens it: see covpool.data.sources.Source.
SOURCES = {
    name: f"covpool.data.sources.{name}"
    for name in ("csv", "shards", "cub", "aircraft", "cars", "parquet", "folder", "files")
}

if TYPE_CHECKING:
    Layout = str
else:
    Layout = Literal[("auto", *(name for name in SOURCES if name != "files"))]  # which has no labels

# The module for data sets that are Python objects.
OBJECTS = "covpool.data.sources.datasets"
