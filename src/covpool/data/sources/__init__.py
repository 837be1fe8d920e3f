"""Where images come from: a file for each layout, which recognises it and lists its images."""

from covpool.data.sources.layouts import layout_of, open_images, open_splits, splits

__all__ = ["layout_of", "open_images", "open_splits", "splits"]
