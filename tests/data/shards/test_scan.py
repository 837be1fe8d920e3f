"""Tars of other programs: the samples found in them. Nothing in a tar is extracted, run or trusted."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from covpool.data.shards.reader import open_shards
from covpool.data.shards.scan import find_images, scan_tar
from covpool.data.shards.write import index_shards
from covpool.errors import BadImageError, ShardError
from tests.data.memory_images import encoded


class Tar:
    """A tar file, written member by member."""

    def __init__(self, path: Path, format: int = tarfile.PAX_FORMAT) -> None:
        self.path = path
        self.tar = tarfile.open(path, "w", format=format)  # noqa: SIM115  closed by close()

    def add(self, name: str, data: bytes = b"", **fields: Any) -> Tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        for field, value in fields.items():
            setattr(member, field, value)
        self.tar.addfile(member, io.BytesIO(data) if data else None)
        return self

    def close(self) -> Path:
        self.tar.close()
        return self.path


def good(path: Path) -> Tar:
    return Tar(path).add("a.png", encoded(1)).add("a.cls", b"0")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_of_another_program(tmp_path: Path, format: int) -> None:
    tar = Tar(tmp_path / "x.tar", format)
    tar.add("train", type=tarfile.DIRTYPE).add("README", b"hello")
    tar.add("train/one.cls", b" 2\n").add("train/one.JPEG", encoded(1)).add("train/one.txt", b"a bird")
    tar.add("train/two.jpg", encoded(2)).add("train/two.cls", b"0")
    tar.add("other/two.png", encoded(3)).add("other/two.cls", b"1").add("other/two.seg.png", encoded(4))
    if format != tarfile.USTAR_FORMAT:
        tar.add(f"{'long' * 60}/é.webp", encoded(5)).add(f"{'long' * 60}/é.cls", b"1")
    tar.close()
    (index,), left_out = index_shards([tmp_path])
    assert left_out == 0
    assert index.classes == ("0", "1", "2")
    found = open_shards(tmp_path)
    expected = [encoded(1), encoded(2), encoded(3)] + ([encoded(5)] if format != tarfile.USTAR_FORMAT else [])
    assert [found.read(i) for i in range(len(found))] == expected
    assert list(found.labels)[:3] == [2, 0, 1]
    assert [found.name(i) for i in range(3)] == ["x.tar/train/one", "x.tar/train/two", "x.tar/other/two"]


def test_what_has_no_image_or_no_label_is_left_out(tmp_path: Path) -> None:
    tar = good(tmp_path / "x.tar")
    tar.add("b.png", encoded(2)).add("c.cls", b"1").add("d.png", encoded(3)).add("d.cls", b"bird")
    tar.add("e.png", encoded(4)).add("e.cls", b"1" * 25).add("f.png", encoded(4)).add("f.cls", b"-1")
    tar.add("g.png", encoded(4)).add("g.cls", b"5" * 100_000).add("h.png", encoded(4)).add(
        "h.cls", b"99999999"
    )
    tar.close()
    scan = scan_tar(tmp_path / "x.tar")
    assert scan.left_out == 7
    assert scan.contents.names == ("x.tar/a",)


def test_a_repeated_name_is_another_sample(tmp_path: Path) -> None:
    good(tmp_path / "x.tar").add("a.png", encoded(2)).add("a.cls", b"3").close()
    assert scan_tar(tmp_path / "x.tar").contents.labels.tolist() == [0, 3]


class Mark:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_is_written_or_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "data" / "shards", tmp_path / "mark"
    folder.mkdir(parents=True)
    evil = pickle.dumps(Mark(mark))
    tar = good(folder / "x.tar")
    for name in ("../up", "../../up", "/absolute", "C:\\up", "..\\up", "a/../../up"):
        tar.add(f"{name}.png", encoded(2)).add(f"{name}.cls", b"0")
    for ending in ("pyd", "pickle", "pkl", "pth", "npy", "json", "cls"):
        tar.add(f"p{ending}.png", encoded(3)).add(f"p{ending}.{ending}", evil)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        tar.add("link.png", type=kind, linkname="/etc/passwd").add("link.cls", b"0")
    for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
        tar.add("device.png", type=kind, devmajor=1, devminor=3).add("device.cls", b"0")
    tar.close()
    before = sorted(tmp_path.rglob("*"))
    index_shards([folder])
    found = open_shards(folder)
    # All but "..\\up", which has nothing before its first dot.
    assert [found.read(i) for i in range(len(found))] == [encoded(1)] + [encoded(2)] * 5
    expected = [*before, folder / "index.json", folder / "x.tar.json"]
    assert sorted(tmp_path.rglob("*")) == sorted(expected)


def test_a_sparse_file_is_no_image(tmp_path: Path) -> None:
    sparse = {"GNU.sparse.size": "1000000000000", "GNU.sparse.map": "0,512", "GNU.sparse.name": "b.png"}
    tar = good(tmp_path / "x.tar").add("b.png", bytes(512), pax_headers=sparse).add("b.cls", b"0")
    tar.add("c.png", encoded(2)).add("c.cls", b"1").close()
    scan = scan_tar(tmp_path / "x.tar")
    assert scan.contents.names == ("x.tar/a", "x.tar/c")
    assert scan.left_out == 1


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a header that claims the given size."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [10**6, 2**40, 2**80, -1, -512, -(2**40)])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_size_that_is_a_lie(tmp_path: Path, size: int, kind: bytes) -> None:
    start = good(tmp_path / "x.tar").close().read_bytes()[:2560]
    (tmp_path / "x.tar").write_bytes(start + header("b.png", size, kind) + bytes(4096))
    tracemalloc.start()
    try:
        with pytest.raises(ShardError, match=r"^x\.tar is truncated|^a tar header of"):
            scan_tar(tmp_path / "x.tar")
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_is_as_large_as_it_says(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(header("b.png", 8_000_000, kind) + bytes(8_001_024))
    tracemalloc.start()
    try:
        with pytest.raises(ShardError, match=r"^a tar header of 8000000 bytes is too large$"):
            scan_tar(tmp_path / "x.tar")
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()


def test_a_header_that_leads_back(tmp_path: Path) -> None:
    sparse = bytearray(header("b.png", -1024, tarfile.GNUTYPE_SPARSE))
    sparse[483:495] = b"00000000010\0"  # the size when unpacked, which is not negative
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    (tmp_path / "x.tar").write_bytes(
        good(tmp_path / "x.tar").close().read_bytes()[:2560] + sparse + bytes(4096)
    )
    with pytest.raises(ShardError, match=r"^x\.tar is truncated or damaged at 'b\.png'$"):
        scan_tar(tmp_path / "x.tar")


def test_an_image_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good(tmp_path / "x.tar").close()
    monkeypatch.setattr("covpool.data.shards.scan.MAX_FILE_BYTES", 1000)
    monkeypatch.setattr("covpool.data.shards.scan.checksum", None)
    assert scan_tar(tmp_path / "x.tar").contents.checksums.tolist() == [0]


def test_headers_without_end(tmp_path: Path) -> None:
    chain = (header("././@LongLink", 2, tarfile.GNUTYPE_LONGNAME) + b"a\0".ljust(512, b"\0")) * 3000
    (tmp_path / "x.tar").write_bytes(chain + bytes(1024))
    with pytest.raises(ShardError, match=r"^x\.tar is truncated, damaged or not a tar"):
        scan_tar(tmp_path / "x.tar")


def test_a_label_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = good(tmp_path / "x.tar").add("b.png", encoded(2)).add("b.cls", b"1" + b" " * (1 << 16)).close()
    assert scan_tar(path).left_out == 1


def test_headers_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(header("notes", 0) * 6000 + bytes(1024))
    tracemalloc.start()
    try:
        assert find_images(tmp_path / "x.tar") == []
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_an_extended_header_without_end(tmp_path: Path) -> None:
    sparse = bytearray(header("b.png", 0, tarfile.GNUTYPE_SPARSE))
    sparse[482] = 1  # it is extended
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    (tmp_path / "x.tar").write_bytes(sparse + (bytes(504) + b"\1" + bytes(7)) * 4000 + bytes(1024))
    with pytest.raises(ShardError, match=r"^a tar header of 512 bytes is too large$"):
        scan_tar(tmp_path / "x.tar")


def test_a_tar_that_is_cut_short_anywhere(tmp_path: Path) -> None:
    whole = good(tmp_path / "x.tar").add("b.png", encoded(2)).add("b.cls", b"1").close().read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for length in [*range(0, end, 333), *range(0, end + 1, 512)]:
        (tmp_path / "x.tar").write_bytes(whole[:length])
        with pytest.raises(ShardError, match=r"^x\.tar is truncated"):
            scan_tar(tmp_path / "x.tar")
    (tmp_path / "x.tar").write_bytes(whole[: end + 512])
    assert len(scan_tar(tmp_path / "x.tar").contents.names) == 2


def test_a_damaged_header(tmp_path: Path) -> None:
    whole = bytearray(
        good(tmp_path / "x.tar").add("b.png", encoded(2)).add("b.cls", b"1").close().read_bytes()
    )
    for place in range(0, len(whole), 512):
        if whole[place : place + 6] in (b"a.cls\0", b"b.png\0"):
            damaged = whole.copy()
            damaged[place + 3] ^= 1
            (tmp_path / "x.tar").write_bytes(damaged)
            with pytest.raises(ShardError, match=r"^x\.tar is truncated or damaged"):
                scan_tar(tmp_path / "x.tar")


@pytest.mark.parametrize("data", [b"", b"hello", b"\x89PNG" * 1000, bytes(10)], ids=repr)
def test_no_tar_at_all(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(ShardError, match=r"^x\.tar is truncated"):
        index_shards([tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]


def test_an_empty_tar(tmp_path: Path) -> None:
    Tar(tmp_path / "x.tar").close()
    index_shards([tmp_path])
    assert len(open_shards(tmp_path)) == 0


def test_a_compressed_tar_is_refused(tmp_path: Path) -> None:
    plain = good(tmp_path / "x.tar").close().read_bytes()
    (tmp_path / "x.tar").write_bytes(gzip.compress(plain))
    with pytest.raises(
        ShardError, match=r"^x\.tar is compressed, so single images .* decompress it with gunzip first"
    ):
        index_shards([tmp_path])


def test_a_damaged_image_is_one_bad_image(tmp_path: Path) -> None:
    path = good(tmp_path / "x.tar").add("b.png", encoded(2)).add("b.cls", b"1").close()
    index_shards([tmp_path])
    found = open_shards(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(encoded(1)) + 100] ^= 4
    path.write_bytes(data)
    with pytest.raises(BadImageError, match=r"^x\.tar holds other bytes than when it was indexed$") as caught:
        found.read(0)
    assert caught.value.reason == "unreadable"
    assert found.read(1) == encoded(2)
    with path.open("r+b") as file:
        file.truncate(data.index(encoded(2)) + 10)
    with pytest.raises(BadImageError, match=r"^x\.tar ends before it does$") as caught:
        found.read(1)
    assert caught.value.reason == "truncated"


def test_global_fields_have_a_limit(tmp_path: Path) -> None:
    """The tarfile module copies them for every member: many small headers would take quadratic time."""
    path = tmp_path / "x.tar"
    blocks = [
        tarfile.TarInfo.create_pax_global_header({f"key{i}-{k}": "x" for k in range(500)}) for i in range(8)
    ]
    rest = good(tmp_path / "rest.tar").close().read_bytes()
    path.write_bytes(b"".join(blocks) + rest)
    with pytest.raises(ShardError, match="too many global header fields"):
        scan_tar(path)
    path.write_bytes(blocks[0] + rest)
    assert len(scan_tar(path).contents.names) == 1
