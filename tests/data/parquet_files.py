"""Parquet files as Hugging Face writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.memory_images import MemoryImages

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def huggingface(classes: Sequence[str]) -> dict[bytes, bytes]:
    """Return the metadata of a dataset with a ClassLabel."""
    features = {"image": {"_type": "Image"}, "label": {"names": list(classes), "_type": "ClassLabel"}}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def write_parquet(images: MemoryImages, path: Path, rows: int = 4, texts: bool = False) -> Path:
    """Write all images. Labels are integers with class names, or strings if ``texts``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = (name.rpartition("/")[2] for name in images.names)
    cells = [{"bytes": data, "path": path} for data, path in zip(images.files, paths, strict=True)]
    labels = [images.classes[i] if texts else int(i) for i in images.labels]
    table = pa.table({"image": pa.array(cells, IMAGE), "label": labels})
    if not texts:
        table = table.replace_schema_metadata(huggingface(images.classes))
    pq.write_table(table, path, row_group_size=rows)
    return path
