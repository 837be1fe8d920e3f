"""Writing rows to object storage."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from covpool.errors import ShardError
from covpool.inference.place import open_place


class Growing(MemoryFileSystem):
    """Storage in which partly written files are visible, as on HDFS, and whose connection breaks."""

    protocol = "growing"
    store: dict[str, Any] = {}  # noqa: RUF012  # as in fsspec
    pseudo_dirs = [""]  # noqa: RUF012
    breaks = True

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return MemoryFileSystem._strip_protocol(path.removeprefix("growing://"))

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        assert "/." in path, "under its own name it would be there by half"
        super().pipe_file(path, value[: len(value) // 2] if self.breaks else value)
        if self.breaks:
            raise ConnectionError("broken off")


def test_a_file_that_arrived_by_half_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("growing", Growing, clobber=True)
    Growing.store.clear()
    monkeypatch.setattr("covpool.storage.remote.RETRIES", 0)
    place = open_place("growing://rows")
    with pytest.raises(ShardError, match=r"rows/0.parquet cannot be written: broken off"):
        place.write("0.parquet", b"all of it")
    assert place.sizes() == {}
    monkeypatch.setattr(Growing, "breaks", False)
    for _ in range(2):  # also if the file exists already, because an answer may get lost
        place.write("0.parquet", b"all of it")
    assert place.sizes() == {"0.parquet": 9}
    assert place.read("0.parquet") == b"all of it"


def test_the_mark_of_an_empty_folder_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consoles of object storage create such marks, and listings contain them."""
    place = open_place("memory://marked")
    listed = [{"name": "/marked/", "size": 0}, {"name": "/marked/job.json", "size": 7}]
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda self, path, detail: listed)
    assert place.sizes() == {"job.json": 7}
