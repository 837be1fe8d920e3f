"""Every kind of input gives the same images, accessed by number."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from covpool.data.image_set import ImageSet
from covpool.data.shards.index import read_index
from covpool.data.shards.reader import ShardSet
from covpool.data.shards.write import index_shards, write_shards
from covpool.data.sources import open_unlabeled
from covpool.errors import BadImageError
from covpool.inference import Files, Predict, Running, infer
from covpool.inference.work import Unit, divide
from covpool.storage.remote import trust_rows
from tests.data.memory_images import MemoryImages
from tests.data.servers import serving
from tests.inference.small import picture, pictures, rows_of, write_folder

FILES = pictures(30)
NAMES, BYTES = list(FILES), list(FILES.values())


def tar(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def a_folder(root: Path) -> Path:
    return write_folder(root / "images", {**FILES, ".hidden.jpg": b"", "notes.txt": b""})


def a_csv(root: Path) -> Path:
    a_folder(root)
    lines = "".join(f"{i},images/{name}\r\n" for i, name in enumerate(NAMES))
    (root / "list.csv").write_text(f"number,path\r\n{lines}", newline="")
    return root / "list.csv"


def a_parquet(root: Path) -> Path:
    pq.write_table(pa.table({"id": NAMES, "image": BYTES}), root / "some.parquet", row_group_size=7)
    return root / "some.parquet"


def parquets(root: Path) -> Path:
    """Write images as Hugging Face does, in two files, one of them in a folder."""
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": data, "path": name} for name, data in FILES.items()]
    (root / "hub/data").mkdir(parents=True)
    for part, name in ((rows[:11], "a.parquet"), (rows[11:], "data/b.parquet")):
        pq.write_table(pa.table({"image": pa.array(part, kind)}), root / "hub" / name, row_group_size=4)
    return root / "hub"


def parquet_of_paths(root: Path) -> Path:
    a_folder(root)
    pq.write_table(pa.table({"path": [f"images/{name}" for name in NAMES]}), root / "paths.parquet")
    return root / "paths.parquet"


def indexed(root: Path) -> Path:
    images = MemoryImages(("a",), np.zeros(len(FILES), dtype=np.int64), NAMES, BYTES)
    write_shards(images, root / "shards", shard_bytes=20_000, seed=0)
    return root / "shards"


def foreign_tars(root: Path) -> Path:
    """Write tars without labels, as other programs do."""
    (root / "tars").mkdir()
    for k in range(3):
        some = {name.replace("/", "_"): FILES[name] for name in NAMES[10 * k : 10 * (k + 1)]}
        tar(root / f"tars/part{k}.tar", some)
    return root / "tars"


MAKERS = [a_folder, a_csv, a_parquet, parquets, parquet_of_paths, indexed, foreign_tars]


def contents(images: ImageSet) -> dict[str, bytes]:
    return {images.name(i): images.read(i) for i in range(len(images))}


def base(name: str) -> str:
    """Return an id without the parts that depend on the kind of input."""
    return name.removeprefix("images/").rpartition("/")[2].removeprefix("more_").removesuffix(".jpg")


def same(images: ImageSet) -> bool:
    found = contents(images)
    if "a.parquet#0" in found:  # rows of bytes without an id are named by their numbers
        return list(found.values()) == BYTES
    return {base(name): data for name, data in found.items()} == {
        base(name): data for name, data in FILES.items()
    }


@pytest.mark.parametrize("make", MAKERS)
def test_every_kind(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    images = open_unlabeled(path)
    assert len(images) == len(FILES)
    assert same(images)
    assert open_unlabeled(path).stamp() == images.stamp()


@pytest.mark.parametrize(
    "make", [a_folder, a_parquet, parquets, foreign_tars], ids=lambda make: make.__name__
)
def test_other_images_under_the_same_names_are_told_apart(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    before = open_unlabeled(make(tmp_path / "one"))
    others = [data[::-1] for data in BYTES]  # the same sizes, in another order below
    monkeypatch.setattr("tests.inference.test_inputs.BYTES", [*others[1:], others[0]])
    monkeypatch.setattr(
        "tests.inference.test_inputs.FILES", dict(zip(NAMES, [*others[1:], others[0]], strict=True))
    )
    (tmp_path / "two").mkdir()
    after = open_unlabeled(make(tmp_path / "two"))
    assert len(after) == len(before)
    assert after.stamp() != before.stamp()


@pytest.mark.parametrize("table", ["csv", "parquet"])
def test_the_same_paths_from_another_folder_are_other_images(tmp_path: Path, table: str) -> None:
    stamps = []
    for day in ("monday", "tuesday"):
        write_folder(tmp_path / day, {"a.jpg": picture(len(day))})
        (tmp_path / day / "list.csv").write_text("path\na.jpg\n")
        pq.write_table(pa.table({"path": ["a.jpg"]}), tmp_path / day / "list.parquet")
        stamps.append(open_unlabeled(tmp_path / day / f"list.{table}").stamp())
    assert stamps[0] != stamps[1]


@pytest.mark.parametrize("make", MAKERS[:-1])
def test_every_kind_in_a_store(
    tmp_path: Path,
    memory: fsspec.AbstractFileSystem,
    make: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    path = make(tmp_path / "here")
    memory.put(str(tmp_path / "here"), "/bucket", recursive=True)
    assert same(open_unlabeled(f"memory://bucket/{path.name}"))


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (a_folder, 2),
        (indexed, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((a_folder, 0), (indexed, 2), (parquets, 0), (parquets, 2))
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_whole_job_in_a_store(
    tmp_path: Path,
    bundle: Path,
    memory: fsspec.AbstractFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    workers: int,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    path = make(tmp_path / "here")
    memory.put(str(path), "/bucket", recursive=True)
    files, running = Files("parquet", rows_per_file=8), Running(batch_size=4, workers=workers)
    infer(bundle, path, tmp_path / "disk", Predict(), files, running)
    done = infer(bundle, "memory://bucket", "memory://rows", Predict(), files, running)
    memory.get("/rows", str(tmp_path / "store"), recursive=True)
    assert rows_of(tmp_path / "store") == rows_of(tmp_path / "disk")
    assert done.bad_images == 4
    assert infer(bundle, "memory://bucket", "memory://rows", Predict(), files, running).new_files == 0
    with pytest.raises(ValueError, match="top was 5, is 2"):
        infer(bundle, "memory://bucket", "memory://rows", Predict(top=2), files, running)


def test_one_image(tmp_path: Path) -> None:
    images = open_unlabeled(write_folder(tmp_path, {"a.jpg": picture(0)}) / "a.jpg")
    assert contents(images) == {"a.jpg": picture(0)}


def test_a_row_without_id_or_path_is_named_by_its_number(tmp_path: Path) -> None:
    pq.write_table(pa.table({"bytes": BYTES[:3]}), tmp_path / "some.parquet", row_group_size=2)
    images = open_unlabeled(tmp_path / "some.parquet")
    assert [images.name(i) for i in range(3)] == [f"some.parquet#{i}" for i in range(3)]


def test_every_image_in_a_tar_has_an_id_of_its_own(tmp_path: Path) -> None:
    """Names may have dots, and two tars may have the same name."""
    names = [
        "./shots/Screenshot at 10.32.11.png",
        "./bird.v2.png",
        "cat.jpg",
        "cat.png",
        "x/._cat.jpg",
        "a.txt",
    ]
    shoe = json.dumps({"name": "shoe"}).encode()
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
        tar(tmp_path / folder / "00000.tar", {**dict.fromkeys(names, b"image"), "cat.json": shoe})
    images = open_unlabeled(tmp_path)
    ids = [images.name(i) for i in range(len(images))]
    inside = ["shots/Screenshot at 10.32.11.png", "bird.v2.png", "cat.jpg", "cat.png"]
    assert ids == [f"{folder}/00000.tar/{name}" for folder in ("train", "val") for name in inside]


def test_bytes_are_not_named_by_the_end_of_a_path(tmp_path: Path) -> None:
    """Hugging Face keeps only the end of a path, and ``cat/1.jpg`` is not ``dog/1.jpg``."""
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": data, "path": "1.jpg"} for data in BYTES[:2]]
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "some.parquet")
    images = open_unlabeled(tmp_path / "some.parquet")
    assert [images.name(i) for i in range(2)] == ["some.parquet#0", "some.parquet#1"]


def test_what_an_index_leaves_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "some").mkdir()
    tar(tmp_path / "some/a.tar", {"1.jpg": BYTES[0], "2.jpg": BYTES[1], "2.cls": b"0", "3.jpg": BYTES[2]})
    assert len(open_unlabeled(tmp_path / "some")) == 3
    index_shards([tmp_path / "some"])
    assert len(open_unlabeled(tmp_path / "some")) == 1
    assert "its index.json is without 2 samples that have no label" in caplog.text
    (tmp_path / "none").mkdir()
    tar(tmp_path / "none/a.tar", {"1.jpg": BYTES[0]})
    index_shards([tmp_path / "none"])
    with pytest.raises(ValueError, match=r"without 1 sample that .* Remove index.json"):
        open_unlabeled(tmp_path / "none")


def test_rows_without_an_image_are_bad_images(tmp_path: Path) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [None, {"bytes": None, "path": None}, {"bytes": None, "path": "absent.jpg"}]
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "some.parquet")
    images = open_unlabeled(tmp_path / "some.parquet")
    for i in (0, 1):
        with pytest.raises(BadImageError, match="no image"):
            images.read(i)
    with pytest.raises(FileNotFoundError):
        images.read(2)


def test_a_list_may_have_urls_and_paths_of_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http by it")
    write_folder(tmp_path, {"b.jpg": picture(2)})
    with serving() as server:
        server.files["/a.jpg"] = picture(1)
        names = (f"{server.url}/a.jpg", f"{tmp_path}/b.jpg", f"{server.url}/c.jpg")
        (tmp_path / "list.csv").write_text("\n".join(["path", *names]))
        with trust_rows():
            images = open_unlabeled(tmp_path / "list.csv")
        assert [images.read(0), images.read(1)] == [picture(1), picture(2)]
        with pytest.raises(FileNotFoundError, match="does not exist"):
            images.read(2)


def parquet_with_a_bad_name() -> bytes:
    """Return a Parquet file with a column name that is not UTF-8."""
    stream = io.BytesIO()
    pq.write_table(pa.table({"image": [b"x"], "note": ["y"]}), stream)
    return stream.getvalue().replace(b"note", b"\xb0ote")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"notes.txt": b""}, "has no images"),
        ({"a.parquet": b"", "b.jpg": b""}, r"end in \.parquet, such as a\.parquet, next to other images"),
        ({"a.parquet": b"no Parquet"}, "is not a Parquet file, is truncated"),
        ({"a.parquet": parquet_with_a_bad_name()}, "is not a Parquet file, or is truncated: 'utf-8' codec"),
        ({"list.csv": b"file\na.jpg\n"}, "has no column 'path'"),
        ({"list.csv": b"path,label\n,1\n"}, "has no path in row 2"),
        ({"list.csv": b"path\n\xff\n"}, "not in UTF-8"),
        ({"a.tar": b"no tar"}, "truncated, damaged or not a tar"),
    ],
)
def test_what_is_refused(tmp_path: Path, files: dict[str, bytes], sentence: str) -> None:
    write_folder(tmp_path, files)
    (name,) = files if "list.csv" in files else ("",)
    with pytest.raises(ValueError, match=sentence):
        open_unlabeled(tmp_path / name)


def test_columns_that_hold_no_images(tmp_path: Path) -> None:
    for name, table in (("a", {"x": [1]}), ("b", {"image": [1]}), ("c", {"path": [1]})):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    for name, sentence in (("a", "its columns are x"), ("b", "has int64 in its"), ("c", "has int64 in its")):
        with pytest.raises(ValueError, match=sentence):
            open_unlabeled(tmp_path / f"{name}.parquet")


def test_tars_in_a_store_need_an_index(tmp_path: Path, memory: fsspec.AbstractFileSystem) -> None:
    memory.put(str(foreign_tars(tmp_path)), "/bucket", recursive=True)
    with pytest.raises(ValueError, match="covpool shard --index"):
        open_unlabeled("memory://bucket")


def test_what_does_not_exist(memory: fsspec.AbstractFileSystem) -> None:
    for absent in ("/nowhere/at/all", "memory://nowhere"):
        with pytest.raises(FileNotFoundError):
            open_unlabeled(absent)
    with pytest.raises(ValueError, match="cannot be opened"):
        open_unlabeled("nosuchstore://bucket")


def test_a_date_that_python_has_not_keeps_no_file_from_being_read(tmp_path: Path) -> None:
    table = pa.table({"image": BYTES[:2], "when": pa.array([2**60, 0], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "some.parquet")
    assert len(open_unlabeled(tmp_path / "some.parquet")) == 2


def test_of_two_images_by_one_name_in_a_tar_the_later_counts(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", {"a.jpg": picture(0), "jpg": b"no ending"})
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo("a.jpg")
        member.size = len(picture(1))
        archive.addfile(member, io.BytesIO(picture(1)))
    assert contents(open_unlabeled(path)) == {"a.tar/a.jpg": picture(1)}


class TestUnits:
    def test_of_a_folder(self, tmp_path: Path) -> None:
        units = divide(open_unlabeled(a_folder(tmp_path)), 12)
        assert units == [Unit("0000000", 0, 12), Unit("0000001", 12, 24), Unit("0000002", 24, 30)]

    def test_of_tars(self, tmp_path: Path) -> None:
        units = divide(open_unlabeled(foreign_tars(tmp_path)), 6)
        names = [f"{k:07d}-part{k // 2}" for k in range(6)]
        starts = [0, 6, 10, 16, 20, 26, 30]
        ends = [6, 10, 16, 20, 26, 30]
        assert units == [Unit(*unit) for unit in zip(names, starts, ends, strict=False)]

    def test_of_row_groups(self, tmp_path: Path) -> None:
        units = divide(open_unlabeled(a_parquet(tmp_path)), 15)
        assert [len(unit) for unit in units] == [14, 14, 2], "groups of 7 stay whole, and never reach over 15"
        units = divide(open_unlabeled(tmp_path / "some.parquet"), 5)
        assert [len(unit) for unit in units] == [5, 2, 5, 2, 5, 2, 5, 2, 2]

    def test_mini_batches_stay_in_their_unit(self) -> None:
        assert list(Unit("a", 3, 10).parts(4)) == [range(3, 7), range(7, 10)]


def test_a_shard_takes_less_than_a_kilobyte() -> None:
    """Its images take no memory. The page on scale relies on this."""
    fields = ({"name": f"{i:06d}.tar", "bytes": 2**28, "contents": f"{i:064x}"} for i in range(2000))
    shards = [{**field, "samples": 3000} for field in fields]
    data = json.dumps({"format": "covpool shards", "version": 2, "classes": [], "shards": shards}).encode()
    tracemalloc.start()
    images = ShardSet(read_index(data), None)  # type: ignore[arg-type]  # nothing is read
    units = divide(images, 10_000)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(images) > len(units) == 2000
    assert taken / 2000 < 1000


def test_memory_does_not_grow_with_the_images_in_tars(tmp_path: Path) -> None:
    sizes = []
    for count in (20, 200):
        (tmp_path / str(count)).mkdir()
        tar(tmp_path / f"{count}/a.tar", {f"{i}.jpg": BYTES[0] for i in range(count)})
        sizes.append(len(pickle.dumps(open_unlabeled(tmp_path / str(count)))))
    assert abs(sizes[1] - sizes[0]) < 20
