"""Fingerprints and stamps keep the values of earlier versions, because runs and jobs resume by them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from covpool.data.image_set import Joined, Relabelled, Subset
from covpool.data.shards.write import write_shards
from covpool.data.sources import open_images, open_splits, open_unlabeled

FINGERPRINTS = {
    "folder": "891ff7c5fea5d152",
    "csv": "be15c0d46963e003",
    "shards": "cdf572672321dbe8",
    "subset": "81bf3b4e405d2f36",
    "joined": "8a836a9e5b9b3b4e",
    "relabelled": "4a40ad29b1a558b4",
}
STAMPS = {
    "folder": "1be299b5931738df",
    "list.csv": "2fa878ad2f90a475",
    "shards": "d37a73c5ec995a08",
    "tars": "3425eb5ba8422839",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        for i in range(6):
            path = tmp_path / f"folder/{split}/{'abc'[i % 3]}/{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"%d" % i * 9)
            os.utime(path, ns=(0, 10**9 * i))
    rows = (f"folder/train/{'abc'[i % 3]}/{i}.jpg,{'abc'[i % 3]}\n" for i in range(6))
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(rows))
    write_shards(open_images(tmp_path / "folder"), tmp_path / "shards", shard_bytes=3000, seed=0)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars/a.tar", "w") as tar:
        for i in range(3):
            member = tarfile.TarInfo(f"{i}.jpg")
            member.size = 9
            tar.addfile(member, io.BytesIO(b"%d" % i * 9))
    os.utime(tmp_path / "tars/a.tar", ns=(0, 7))
    return tmp_path


def test_fingerprints(root: Path) -> None:
    train, test = (open_splits(root / "folder")[split] for split in ("train", "test"))
    sets = {
        "folder": train,
        "csv": open_images(root / "list.csv"),
        "shards": open_images(root / "shards"),
        "subset": Subset(train, np.arange(1, 4)),
        "joined": Joined((train, test)),
        "relabelled": Relabelled(train, ("d", "c", "b", "a")),
    }
    assert {name: images.fingerprint()[:16] for name, images in sets.items()} == FINGERPRINTS


@pytest.mark.parametrize("name", STAMPS)
def test_stamps(root: Path, name: str) -> None:
    assert open_unlabeled(root / name).stamp()[:16] == STAMPS[name]
