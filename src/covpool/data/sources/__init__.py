"""Where images come from: a file for each layout, which recognises it and lists its images.

- ``folder``: ``train/wren/1.jpg``, with ``val`` and ``test`` beside ``train``; or ``wren/1.jpg``, not split.
- ``csv``: a table ``path,label`` or ``path,label,split``.
- ``cub``, ``aircraft``, ``cars``: CUB-200-2011, FGVC-Aircraft and Stanford Cars as their authors ship them.
- ``shards``: tars with an index, as ``covpool shard`` writes them.
"""

from covpool.data.sources.layouts import layout_of, open_images, open_splits, splits

__all__ = ["layout_of", "open_images", "open_splits", "splits"]
