"""Bulk inference in folders that others prepared: links, claims of sizes, and changed parts."""

from __future__ import annotations

import contextlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from covpool.data.sources import open_unlabeled
from covpool.errors import CovpoolError, ShardError, UnreachableError
from covpool.inference import Files, Predict, Running, infer
from covpool.storage.folders import LOCK
from covpool.storage.manifest import Manifest
from tests.inference.small import pictures, write_folder

RUNNING = Running(batch_size=16, workers=0)


@pytest.mark.parametrize("name", [LOCK, "_manifest.json", "_job.json", "folder-00000.csv", "report.html"])
def test_a_link_in_the_output_folder_leads_no_write_outside(name: str, tmp_path: Path, bundle: Path) -> None:
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_text("years of work")
    out.mkdir()
    (out / name).symlink_to(precious)
    with contextlib.suppress(CovpoolError):  # a link at the manifest alone is replaced
        infer(bundle, write_folder(tmp_path / "data", pictures(2)), out, Predict(), running=RUNNING)
    assert precious.read_text() == "years of work"


def test_the_output_folder_itself_may_be_a_link(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    infer(bundle, write_folder(tmp_path / "data", pictures(2)), tmp_path / "out", Predict(), running=RUNNING)
    assert (tmp_path / "disk" / "_job.json").exists()


def test_verify_computes_a_part_again_that_the_manifest_does_not_list(tmp_path: Path, bundle: Path) -> None:
    data, out, files = write_folder(tmp_path / "data", pictures(4)), tmp_path / "out", Files("csv")
    infer(bundle, data, out, Predict(), files, RUNNING)
    (part,) = out.glob("*.csv")
    before = part.read_bytes()
    part.write_bytes(before.replace(b"0.", b"0.9", 1))
    (out / "_manifest.json").write_bytes(Manifest({}).written())
    infer(bundle, data, out, Predict(), files, Running(batch_size=16, workers=0, verify=True))
    assert part.read_bytes() == before


def test_an_index_cannot_claim_more_samples_than_its_tar_holds(tmp_path: Path) -> None:
    tarfile.open(tmp_path / "0.tar", "w").close()
    size = (tmp_path / "0.tar").stat().st_size
    shard = {"name": "0.tar", "bytes": size, "samples": 2**61, "contents": ""}
    index = {"format": "covpool shards", "version": 2, "classes": ["a"], "left_out": 0, "shards": [shard]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ShardError, match=r"lists more samples of 0\.tar than its 10,240 bytes can hold"):
        open_unlabeled(tmp_path)


def test_a_small_parquet_file_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.data.sources.parquet_file.MAX_DECODED_BYTES", 1 << 20)
    values = pa.array([bytes(1 << 20)], pa.binary())
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), values)
    pq.write_table(
        pa.table({"image": column}), tmp_path / "bomb.parquet", compression="zstd", store_schema=False
    )
    read, rows = pq.ParquetFile.iter_batches, list[int]()

    def iter_batches(self: pq.ParquetFile, size: int, *arguments: Any, **options: Any) -> Any:
        rows.append(size)
        return read(self, size, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    with pytest.raises(ShardError, match="decodes to more than"):
        open_unlabeled(tmp_path / "bomb.parquet").read(0)
    assert rows == [1]  # a batch is decoded at once


def test_a_parquet_file_cannot_state_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its footer states the size that it decodes to, which is far above that of the file."""
    monkeypatch.setattr("covpool.data.sources.parquet_file.MAX_DECODED_BYTES", 1 << 20)
    table = pa.table({"image": pa.array([bytes(1 << 20)] * 8, pa.binary())})
    pq.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(ShardError, match="decodes to more than"):
        open_unlabeled(tmp_path / "bomb.parquet").read(0)


def test_the_footer_of_a_parquet_file_has_a_limit(tmp_path: Path) -> None:
    for size in (20, 1 << 32):
        with (tmp_path / "bomb.parquet").open("wb") as file:
            file.write(b"PAR1")
            file.truncate(size - 8)
            file.seek(size - 8)
            file.write((1 << 31).to_bytes(4, "little") + b"PAR1")
        with pytest.raises(ShardError, match="has a footer of over 134,217,728 bytes"):
            open_unlabeled(tmp_path / "bomb.parquet")


def test_a_row_does_not_follow_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "private").write_bytes(b"a secret")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "1.jpg").symlink_to(tmp_path / "private")
    (tmp_path / "set" / "list.csv").write_text("path\n1.jpg\n")
    with pytest.raises(UnreachableError, match="it is a link out of"):
        open_unlabeled(tmp_path / "set" / "list.csv").read(0)
    (tmp_path / "set" / "list.csv").unlink()
    assert open_unlabeled(tmp_path / "set").read(0) == b"a secret"  # the user named the folder
