"""The content of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from covpool.data.decode import EXTENSIONS, decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.inference import Embed, Files, Predict, Running, infer
from covpool.inference.tasks import projection
from covpool.inference.work import NOT_FINITE
from covpool.models import create_model, load_model, save_model
from tests.data.pictures import encode, photo
from tests.inference.small import CLASSES, ids, picture, pictures, rows_of, write_folder

RUNNING = Running(batch_size=16, workers=0, device="cpu")
COUNT = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data"), pictures(COUNT))


def rows(tmp_path: Path, bundle: Path, data: Path, task: Any, **files: Any) -> list[dict[str, Any]]:
    infer(bundle, data, tmp_path / "out", task, Files(**{"format": "parquet", **files}), RUNNING)
    return rows_of(tmp_path / "out")


def good(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["error"] is None]


def plainly(bundle: Path, data: Path, names: list[str]) -> tuple[Any, Tensor]:
    """Return the network and its input, in as few steps as possible."""
    model = load_model(bundle)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    return model, torch.stack([transform(decode((data / name).read_bytes())) for name in names])


def vectors(bundle: Path, data: Path, names: list[str], flip: bool = False) -> Tensor:
    model, images = plainly(bundle, data, names)
    images = images.flip(-1) if flip else images
    with torch.inference_mode():
        return model.forward_head(model.forward_features(images), pre_logits=True)


def embedded(rows: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([row["vector"] for row in good(rows)])


def test_predictions_are_the_networks(tmp_path: Path, bundle: Path, data: Path) -> None:
    found = rows(tmp_path, bundle, data, Predict(top=3), rows_per_file=15)
    assert ids(found) == sorted(ids(found), key=lambda name: ("/" in name, name))
    assert sorted(ids(found)) == sorted(pictures(COUNT))
    model, images = plainly(bundle, data, ids(good(found)))
    with torch.inference_mode():
        scores, indices = model(images).softmax(dim=1).topk(3)
    for k in range(3):
        assert [row[f"label{k + 1}"] for row in good(found)] == [CLASSES[i] for i in indices[:, k].tolist()]
        got = torch.tensor([row[f"score{k + 1}"] for row in good(found)])
        torch.testing.assert_close(got, scores[:, k], rtol=1e-4, atol=1e-6)


def test_mirrored_images_count_as_much(tmp_path: Path, bundle: Path, data: Path) -> None:
    found = good(rows(tmp_path, bundle, data, Predict(top=1, flip=True)))
    model, images = plainly(bundle, data, ids(found))
    with torch.inference_mode():
        expected = ((model(images) + model(images.flip(-1))) / 2).softmax(dim=1).max(dim=1).values
    got = torch.tensor([row["score1"] for row in found])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_vectors_are_what_the_classifier_receives(tmp_path: Path, bundle: Path, data: Path) -> None:
    found = rows(tmp_path / "unit", bundle, data, Embed())
    expected = vectors(bundle, data, ids(good(found)))
    unit = torch.nn.functional.normalize(expected)
    torch.testing.assert_close(embedded(found), unit, rtol=1e-3, atol=1e-5)
    raw = embedded(rows(tmp_path / "raw", bundle, data, Embed(raw=True)))
    torch.testing.assert_close(raw, expected, rtol=1e-3, atol=1e-5)
    flipped = embedded(rows(tmp_path / "flip", bundle, data, Embed(raw=True, flip=True)))
    both = (expected + vectors(bundle, data, ids(good(found)), flip=True)) / 2
    torch.testing.assert_close(flipped, both, rtol=1e-3, atol=1e-5)


def test_half_the_bytes(tmp_path: Path, bundle: Path, data: Path) -> None:
    whole = embedded(rows(tmp_path / "whole", bundle, data, Embed()))
    half = embedded(rows(tmp_path / "half", bundle, data, Embed(dtype="float16")))
    torch.testing.assert_close(half, whole, rtol=1e-3, atol=1e-4)
    kinds = [
        str(pq.read_schema(tmp_path / name / "out/0000000.parquet").field("vector").type)
        for name in ("whole", "half")
    ]
    assert kinds == ["fixed_size_list<element: float>[36]", "fixed_size_list<element: halffloat>[36]"]


@pytest.mark.slow
def test_bfloat16_is_near(tmp_path: Path, bundle: Path, data: Path) -> None:
    whole = embedded(rows(tmp_path / "whole", bundle, data, Embed()))
    half = embedded(rows(tmp_path / "half", bundle, data, Embed(precision="bfloat16")))
    assert not torch.equal(half, whole)
    assert (half * whole).sum(dim=1).min() > 0.99


def test_a_projection_keeps_distances() -> None:
    torch.manual_seed(1)
    points = torch.nn.functional.normalize(torch.randn(60, 2080))
    matrix = projection(2080, 512, seed=3)
    ratio = torch.pdist(points @ matrix) / torch.pdist(points)
    assert ratio.mean().item() == pytest.approx(1, abs=0.01)
    assert 0.85 < ratio.min() < ratio.max() < 1.15
    assert torch.equal(matrix, projection(2080, 512, seed=3))
    assert not torch.equal(matrix, projection(2080, 512, seed=4))


@pytest.mark.slow
def test_projected_vectors(tmp_path: Path, bundle: Path, data: Path) -> None:
    whole = embedded(rows(tmp_path / "whole", bundle, data, Embed()))
    short = embedded(rows(tmp_path / "short", bundle, data, Embed(project=12, seed=5)))
    torch.testing.assert_close(short, whole @ projection(36, 12, seed=5), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="project must be at most 36"):
        infer(bundle, data, tmp_path / "more", Embed(project=37), running=RUNNING)


@pytest.mark.slow
def test_csv_has_the_same_rows(tmp_path: Path, bundle: Path, data: Path) -> None:
    for task in (Predict(top=2), Embed(project=3, dtype="float16")):
        name = type(task).__name__
        parquet = rows(tmp_path / f"{name}-parquet", bundle, data, task, rows_per_file=16)
        table = rows(tmp_path / f"{name}-csv", bundle, data, task, rows_per_file=16, format="csv")
        for one, other in zip(parquet, table, strict=True):
            vector = one.pop("vector", None)
            if isinstance(task, Embed):
                one |= {f"vector{k + 1}": None if vector is None else vector[k] for k in range(3)}
            assert one.keys() == other.keys()
            for column, value in one.items():
                assert other[column] == (
                    pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                )


def test_a_bad_image_of_each_kind(tmp_path: Path, bundle: Path) -> None:
    jpeg = encode(photo((80, 80)), "JPEG")
    files = {
        "empty.jpg": b"",
        "nonsense.jpg": b"nonsense",
        "short.jpg": jpeg[: len(jpeg) // 2],
        "page.jpg": b"<html><body>404</body></html>",
        "line.png": encode(photo((2, 400)), "PNG"),
        "good.jpg": picture(0),
    }
    data = write_folder(tmp_path / "data", files)
    (data / "gone.jpg").symlink_to(tmp_path / "nowhere")
    found = {row["id"]: row for row in rows(tmp_path, bundle, data, Predict(top=2))}
    assert found.pop("good.jpg")["error"] is None
    errors = {name: row["error"] for name, row in found.items()}
    assert errors == {
        "empty.jpg": "unreadable: the file is empty",
        "nonsense.jpg": "unreadable: it is not a known image format: it starts with b'nonsense'",
        "short.jpg": "truncated: the end of the JPEG is missing",
        "page.jpg": f"format: it is a web page; covpool reads {', '.join(EXTENSIONS)}",
        "line.png": "too large: it is 2 by 400, a line",
        "gone.jpg": "unreadable: No such file or directory",
    }
    for row in found.values():
        assert {value for name, value in row.items() if name not in ("id", "error")} == {None}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_address_that_is_none_costs_its_row(tmp_path: Path, bundle: Path, workers: int) -> None:
    write_folder(tmp_path, {"good.jpg": picture(0)})
    (tmp_path / "list.csv").write_text("path\ngood.jpg\nnowhere://a/b.jpg\n")
    infer(
        bundle,
        tmp_path / "list.csv",
        tmp_path / "out",
        Predict(top=1),
        Files("parquet"),
        Running(workers=workers),
    )
    good, bad = rows_of(tmp_path / "out")
    assert good["error"] is None
    assert bad["error"].startswith("unreachable: a row may not name a URL of 'nowhere': use ")


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_logits_that_are_no_numbers_are_an_error(tmp_path: Path, kind: str) -> None:
    model = create_model("test_resnet", dim=8, num_classes=3, image_size=64)
    with torch.no_grad():
        model.head.classifier.bias[1] = 3e38  # the sum overflows
        model.head.classifier.weight[1] = 3e38
    bundle = save_model(model, tmp_path / "bundle")
    data = write_folder(tmp_path / "data", {"a.jpg": picture(0), "b.jpg": b""})
    first, second = rows(tmp_path, bundle, data, Predict(top=1), format=kind)
    assert first == {"id": "a.jpg", "label1": None, "score1": None, "error": NOT_FINITE}
    assert second["error"] == "unreadable: the file is empty"


def test_numbers_that_float16_cannot_hold_are_an_error(tmp_path: Path, data: Path) -> None:
    model = create_model("test_resnet", dim=8, num_classes=3, image_size=64, rank=1)
    before = save_model(model, tmp_path / "before")
    numbers = embedded(rows(tmp_path / "small", before, data, Embed(raw=True)))[:, 0].abs()
    with torch.no_grad():
        model.head.hidden[0].weight *= 65504 / numbers.median()
    bundle = save_model(model, tmp_path / "bundle")
    whole = good(rows(tmp_path / "whole", bundle, data, Embed(raw=True)))
    half = {row["id"]: row for row in rows(tmp_path / "half", bundle, data, Embed(raw=True, dtype="float16"))}
    fitting = [row for row in whole if abs(row["vector"][0]) < 65504]
    assert 0 < len(fitting) < len(whole)
    for row in whole:
        found = half[row["id"]]
        if abs(row["vector"][0]) > 66000:
            assert (found["vector"], found["error"]) == (None, NOT_FINITE)
        elif abs(row["vector"][0]) < 65000:
            assert found["vector"] == pytest.approx(row["vector"], rel=1e-2)
            assert found["error"] is None


def test_a_file_of_bad_images_alone(tmp_path: Path, bundle: Path) -> None:
    data = write_folder(tmp_path / "data", {f"{i}.jpg": b"" for i in range(5)})
    found = rows(tmp_path, bundle, data, Embed(), rows_per_file=2)
    assert [row["vector"] for row in found] == [None] * 5


def test_names_of_any_bytes(tmp_path: Path, bundle: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    try:
        (data / b"caf\xe9.jpg".decode("utf-8", "surrogateescape")).write_bytes(picture(0))
    except OSError:
        pytest.skip("this file system has no such names")
    assert ids(rows(tmp_path, bundle, data, Predict())) == ["caf\\udce9.jpg"]


def test_classes_without_names_are_numbers(tmp_path: Path, data: Path) -> None:
    bundle = save_model(create_model("test_resnet", dim=8, num_classes=3, image_size=64), tmp_path / "bundle")
    found = rows(tmp_path, bundle, data, Predict(top=9))
    assert {row["label1"] for row in good(found)} <= {"0", "1", "2"}
    assert "label3" in found[0]
    assert "label4" not in found[0]
    np.testing.assert_allclose(
        [sum(row[f"score{k}"] for k in (1, 2, 3)) for row in good(found)], 1, rtol=1e-5
    )


def test_a_bundle_without_a_classifier_has_vectors_alone(tmp_path: Path, data: Path) -> None:
    bundle = save_model(create_model("test_resnet", dim=8, num_classes=0, image_size=64), tmp_path / "bundle")
    assert len(embedded(rows(tmp_path, bundle, data, Embed()))[0]) == 36
    with pytest.raises(ValueError, match="'covpool embed' gives vectors"):
        infer(bundle, data, tmp_path / "predict", Predict(), running=RUNNING)


def test_workers_change_nothing(tmp_path: Path, bundle: Path, data: Path) -> None:
    reports: list[tuple[int, int]] = []
    for workers in (0, 2):
        reports.clear()
        running, out = Running(batch_size=6, workers=workers), tmp_path / str(workers)
        infer(
            bundle,
            data,
            out,
            Predict(),
            Files("parquet", rows_per_file=9),
            running,
            lambda *far: reports.append(far),
        )
        assert reports[-1] == (COUNT, COUNT)
        assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert rows_of(tmp_path / "2") == rows_of(tmp_path / "0")


@pytest.mark.slow
def test_a_compiled_network_gives_the_same_rows(bundle: Path, tmp_path: Path) -> None:
    data, embeddings = write_folder(tmp_path / "data", pictures(10)), []
    for compile in (False, True):
        out, running = (
            tmp_path / str(compile),
            Running(batch_size=4, workers=0, device="cpu", compile=compile),
        )
        infer(bundle, data, out, Embed(), Files("parquet"), running)
        embeddings.append(embedded(rows_of(out)))
    assert len(embeddings[0]) > 5
    torch.testing.assert_close(embeddings[1], embeddings[0], atol=1e-5, rtol=0)
