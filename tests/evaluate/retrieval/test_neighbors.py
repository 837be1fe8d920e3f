"""Search for a photograph among the embeddings that ``covpool embed`` wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import covpool
from covpool.cli.main import main
from covpool.evaluate.neighbors import _opened
from covpool.storage.address import Address
from tests.data.pictures import SPARROWS, jpeg, needs_sparrows

pytestmark = needs_sparrows


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = covpool.create_model("test_resnet", dim=8, num_classes=2, image_size=64)
    covpool.save_model(model, "bundle", classes=["a", "b"])
    folder = tmp_path / "photos"
    folder.mkdir()
    for image in sorted(SPARROWS.glob("test/*/*.jpg"))[:60:5]:
        (folder / image.name).symlink_to(image)
    return "bundle"


@pytest.mark.parametrize("more", [[], ["--raw"], ["--project", "16", "--flip"]])
def test_a_photograph_finds_itself_first(
    bundle: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workers", "0", "--device", "cpu", "--rows-per-file", "5"]
    assert main(["embed", bundle, "photos", *more, *words]) == 0
    photo = sorted(Path("photos").iterdir())[7]
    capsys.readouterr()
    search = ["retrieve", bundle, str(photo), "--gallery", "runs/embeddings", "--device", "cpu"]
    assert main(search) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{photo.name}:"
    similarity, name = lines[1].split()
    assert name == photo.name
    assert float(similarity) == pytest.approx(1, abs=1e-3)
    found = json.loads(Path("runs/retrieval/neighbors.json").read_bytes())[photo.name]
    assert len({one["id"] for one in found}) == 8
    assert [one["similarity"] for one in found] == sorted((one["similarity"] for one in found), reverse=True)
    with Image.open("runs/retrieval/neighbors.png") as picture:
        assert picture.width > 500


def test_a_gallery_that_does_not_exist_is_named(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieve", bundle, str(SPARROWS), "--gallery", "nodir"]) == 2
    assert "--gallery nodir is neither a folder of covpool embed nor a split of " in capsys.readouterr().err
    photo = next(SPARROWS.rglob("*.jpg"))
    assert main(["retrieve", bundle, str(photo), "--gallery", "nodir"]) == 2
    assert "--gallery nodir is not a folder of covpool embed" in capsys.readouterr().err


def test_embeddings_of_another_bundle_are_refused(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", bundle, "photos", "--workers", "0", "--device", "cpu"]) == 0
    torch.manual_seed(1)
    covpool.save_model(covpool.create_model("test_resnet", dim=8, num_classes=2, image_size=64), "other")
    photo = sorted(Path("photos").iterdir())[0]
    assert main(["retrieve", "other", str(photo), "--gallery", "runs/embeddings"]) == 2
    assert "has no embeddings of other: run covpool embed with this bundle" in capsys.readouterr().err


def test_more_photographs_than_are_searched_for_are_an_error(
    bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workers", "0", "--device", "cpu"]
    assert main(["embed", bundle, "photos", *words]) == 0
    photo = next(Path("photos").iterdir())
    for number in range(25 - len(list(Path("photos").iterdir()))):
        shutil.copy(photo, Path("photos", f"copy{number}.jpg"))
    capsys.readouterr()
    assert main(["retrieve", bundle, "photos", "--gallery", "runs/embeddings", *words]) == 2
    assert "photos has more than 24 photographs to search for" in capsys.readouterr().err


def test_a_gallery_from_others_is_checked(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", bundle, "photos", "--workers", "0", "--device", "cpu"]) == 0
    query = str(sorted(Path("photos").iterdir())[0])
    search = ["retrieve", bundle, query, "--gallery", "runs/embeddings", "--device", "cpu"]
    (file,) = Path("runs/embeddings").rglob("*.parquet")
    table, width = pq.read_table(file), 36

    def refusal(columns: dict[str, Any]) -> str:
        pq.write_table(pa.table(columns), file, compression="zstd")
        capsys.readouterr()
        assert main(search) == 2
        return capsys.readouterr().err

    assert len(table["vector"][0]) == width
    assert f"vectors that are not of length {width}" in refusal({"id": ["a"], "vector": [[1.0, 2.0]]})
    assert "has no columns 'id' and 'vector'" in refusal({"id": ["a"], "vector": ["text"]})
    assert "has no columns 'id' and 'vector'" in refusal({"name": ["a"]})
    monkeypatch.setattr("covpool.data.sources.parquet_file.MAX_DECODED_BYTES", 1 << 20)
    assert "decodes to more than" in refusal({"id": ["a"] * 60_000, "vector": [[0.0] * width] * 60_000})
    pq.write_table(pa.table({"id": ["\x1b[2Jwren"], "vector": table["vector"][:1]}), file)
    assert main(search) == 0
    assert "?[2Jwren" in capsys.readouterr().out
    Path("runs/embeddings/_job.json").write_text('{"task": "embed"}')
    assert main(search) == 2
    assert "_job.json is damaged: run covpool embed again" in capsys.readouterr().err


def test_a_gallery_does_not_choose_which_images_are_opened(
    bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    for image in Path("photos").iterdir():
        (folder / image.name).write_bytes(image.read_bytes())
    assert main(["embed", bundle, "copies", "--workers", "0", "--device", "cpu"]) == 0
    job = json.loads(Path("runs/embeddings/_job.json").read_bytes())
    Path("runs/embeddings/_job.json").write_text(json.dumps(job | {"data": str(folder)}))
    opened: list[str] = []

    def read(path: str) -> bytes:
        opened.append(path)
        return Path(path).read_bytes()

    monkeypatch.setattr("covpool.storage.address.read_image", read)
    query = str(sorted(Path("photos").iterdir())[0])
    search = ["retrieve", bundle, query, "--gallery", "runs/embeddings", "--device", "cpu"]
    assert main(search) == 0
    assert not [path for path in opened if "copies" in path]
    assert main([*search, "--images", "copies"]) == 0
    assert len([path for path in opened if "copies" in path]) == 8


def test_an_image_of_a_gallery_is_in_the_folder_of_the_images(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("secret.jpg", "photos/1.jpg"):
        (tmp_path / name).write_bytes(jpeg((200, 100, 50)))
    assert _opened(Address.of(tmp_path / "photos"), "1.jpg") is not None
    assert _opened(Address.of(tmp_path / "photos"), "../secret.jpg") is None
