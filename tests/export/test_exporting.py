"""A complete export: its files, its figures, and when it is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, numpy_helper

from covpool.data.decode import decode
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform, pixels_transform
from covpool.evaluate.svm import fit_svm
from covpool.export import ExportOptions, ExportRefusedError, ExportReport, export_model, read_metadata
from covpool.export.exporting import takes_other_sizes
from covpool.export.graph import Runner, Traced, example, torch_runner
from covpool.export.targets import TARGETS
from covpool.models import create_model, load_model, save_model
from covpool.provenance import schema
from tests.data.pictures import needs_sparrows
from tests.evaluate.birds import CLASSES
from tests.export.conftest import OPTIONS, RECIPE, Prepared, reuse

pytestmark = needs_sparrows

ALONE = ExportOptions(formats=("onnx",), rounds=2, free_size=False, batch_size=5)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def changed(model: ModelProto, factor: float) -> ModelProto:
    """Return a copy in which the weights of the classifier are scaled."""
    broken = ModelProto()
    broken.CopyFrom(model)
    (name,) = {node.input[1] for node in broken.graph.node if node.op_type == "Gemm"}
    for weight in broken.graph.initializer:
        if weight.name == name:
            weight.CopyFrom(numpy_helper.from_array(factor * numpy_helper.to_array(weight), name))
    return broken


def input_axes(file: Path) -> list[str | int]:
    (images,) = onnx.load(file).graph.input
    return [axis.dim_param or axis.dim_value for axis in images.type.tensor_type.shape.dim]


def test_all_files_are_there(exported: ExportReport) -> None:
    files = {file.name for file in exported.folder.iterdir()}
    assert files == {*(made.file for made in TARGETS.values()), "model.json", "results.json"}
    assert not list(exported.folder.parent.glob(".*"))
    results = json.loads((exported.folder / "results.json").read_text())
    assert results["objections"] == []
    assert results["free_size"] is False
    assert results["calibration_images"] == 6
    assert results["data"]["images"] == 12
    for file in results["files"]:
        assert file["bytes"] == (exported.folder / file["file"]).stat().st_size
    assert set(results["latency"]) == {*TARGETS, "torch eager"}
    assert {"onnx", "onnxruntime", "onnxscript", "timm", "torch"} <= results["versions"].keys()


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema("covpool.export", "export"))


@pytest.mark.parametrize("name", TARGETS)
def test_figures_by_hand(
    name: str, exported: ExportReport, runners: dict[str, Runner], bundle: Path, birds: Path
) -> None:
    """Read the images one by one with the transform of evaluation, and run the exported file directly."""
    model = load_model(bundle)
    preprocessing = Preprocessing.of(model.pretrained_cfg)
    images = open_images(birds, "test")
    pictures = [decode(images.read(i)) for i in range(len(images))]
    with torch.inference_mode():
        logits = model(torch.stack([evaluation_transform(preprocessing)(one) for one in pictures])).numpy()
    run = runners[name]
    pixels = [pixels_transform(preprocessing)(one).permute(1, 2, 0).numpy() for one in pictures]
    found = np.concatenate([run(one[None]) for one in pixels])
    parity = exported.parity[name]
    assert parity.images == len(pictures) == 12
    assert parity.agreeing == (found.argmax(1) == logits.argmax(1)).sum()
    assert parity.absolute == pytest.approx(np.abs(found - logits).max(), rel=0.05, abs=1e-5)
    assert parity.relative == pytest.approx(parity.absolute / np.abs(logits).max(), rel=1e-5)


def test_lower_precision_is_smaller_and_further(exported: ExportReport) -> None:
    size = {file["format"]: file["bytes"] for file in exported.results["files"]}
    assert size["onnx-int8"] < size["onnx-float16"] < size["onnx"]
    far = {name: parity.relative for name, parity in exported.parity.items()}
    assert far["onnx"] < 1e-5
    assert far["torch"] < 1e-5
    assert far["onnx"] < far["onnx-float16"] < far["onnx-int8"]


@pytest.mark.parametrize("name", ["onnx", "torch"])
def test_any_number_of_images(name: str, runners: dict[str, Runner], prepared: Prepared) -> None:
    run, own = runners[name], torch_runner(prepared.job.graph)
    for number in (1, 3, 8):
        images = example(prepared.job.graph, number, 64, 64).numpy()
        assert relative(run(images), own(images)) < 1e-5


@pytest.mark.slow
def test_images_of_any_size(prepared: Prepared, bundle: Path, birds: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, formats=("onnx", "torch"), free_size=True)
    report, own = export_model(bundle, birds, tmp_path / "new", options=options), prepared.job.graph
    assert report.results["free_size"] is True
    for target in (TARGETS["onnx"], TARGETS["torch"]):
        run = target.load(report.folder / target.file)
        for shape in ((1, 64, 64), (1, 96, 96), (2, 80, 80), (1, 224, 224), (2, 33, 80)):
            images = example(own, *shape).numpy()
            assert relative(run(images), torch_runner(own)(images)) < 1e-5
        found = read_metadata(report.folder / target.file)["input"]
        assert found == {"name": "images", "type": "uint8", "shape": [None, None, None, 3]}
    assert input_axes(report.folder / "model.onnx") == ["batch", "height", "width", 3]


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_says_what_it_is(name: str, exported: ExportReport, bundle: Path) -> None:
    found = read_metadata(exported.folder / TARGETS[name].file)
    assert found.pop("precision") == TARGETS[name].precision
    assert found == json.loads((exported.folder / "model.json").read_text())
    assert found["classes"] == list(CLASSES)
    assert found["recipe"] == RECIPE
    assert found["config"]["backbone"] == "test_resnet"
    assert found["input"] == {"name": "images", "type": "uint8", "shape": [None, 64, 64, 3]}
    assert found["output"]["shape"] == [None, 6]
    assert found["preprocessing"]["in_graph"] is True
    assert found["preprocessing"]["resize"] == int(64 / load_model(bundle).pretrained_cfg["crop_pct"])


@pytest.mark.parametrize("name", TARGETS)
def test_no_file_names_the_machine_that_made_it(name: str, exported: ExportReport) -> None:
    assert str(Path(__file__).parents[2]).encode() not in (exported.folder / TARGETS[name].file).read_bytes()


def test_axes_of_the_file_have_names(exported: ExportReport) -> None:
    assert input_axes(exported.folder / "model.onnx") == ["batch", 64, 64, 3]
    graph = onnx.load(exported.folder / "model.onnx").graph
    assert [(v.name, v.type.tensor_type.elem_type) for v in graph.output] == [
        ("logits", onnx.TensorProto.FLOAT)
    ]


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (
            -1.0,
            r"^model.onnx predicts torch's top-1 class on \d+ of 12 images \(.*\); float32 requires 100 %",
        ),
        (
            1.01,
            r"^the logits of model.onnx differ from torch's by 1.\de-02 of the largest logit; float32 allows",
        ),
    ],
)
def test_a_broken_file_is_refused(
    factor: float,
    sentence: str,
    prepared: Prepared,
    bundle: Path,
    birds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reuse(monkeypatch, prepared, changed(prepared.model, factor))
    with pytest.raises(ExportRefusedError, match=sentence):
        export_model(bundle, birds, tmp_path / "new", options=ALONE)
    assert list(tmp_path.iterdir()) == []
    report = export_model(bundle, birds, tmp_path / "new", options=ALONE, force=True)
    assert (tmp_path / "new" / "model.onnx").exists()
    assert len(report.results["objections"]) == 1


def test_a_refused_export_leaves_an_earlier_one(
    prepared: Prepared,
    exported: ExportReport,
    bundle: Path,
    birds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = shutil.copytree(exported.folder, tmp_path / "new")
    before = {file.name: file.read_bytes() for file in earlier.iterdir()}
    reuse(monkeypatch, prepared, changed(prepared.model, -1.0))
    with pytest.raises(ExportRefusedError):
        export_model(bundle, birds, earlier, options=ALONE)
    assert {file.name: file.read_bytes() for file in earlier.iterdir()} == before
    reuse(monkeypatch, prepared)
    export_model(bundle, birds, earlier, options=ALONE)
    assert {file.name for file in earlier.iterdir()} == {"model.onnx", "model.json", "results.json"}


def test_a_file_that_takes_one_size_alone_is_found_out(
    prepared: Prepared, bundle: Path, birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch_runner(prepared.job.graph)

    def fixed(images: np.ndarray) -> np.ndarray:
        assert images.shape[1] == 64
        return own(images)

    assert takes_other_sizes(prepared.job, own)
    assert not takes_other_sizes(prepared.job, fixed)
    assert not takes_other_sizes(prepared.job, lambda images: own(images[:, :64, :64]))
    reuse(monkeypatch, prepared)
    monkeypatch.setattr(Traced, "has_free_size", True)
    monkeypatch.setattr("covpool.export.exporting.takes_other_sizes", lambda *_: False)
    with pytest.raises(ExportRefusedError, match=r"^model.onnx is wrong for images of other sizes than 64"):
        export_model(bundle, birds, tmp_path / "new", options=ALONE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_svms_on_both_orders(birds: Path, tmp_path: Path) -> None:
    """Export a bundle of ``covpool svm`` with ``join="gap"``; the caller normalizes the images."""
    torch.manual_seed(1)
    network = create_model("test_resnet", dim=4, num_classes=6, image_size=64, join="gap")
    save_model(network, tmp_path / "net", classes=CLASSES)
    fit_svm(tmp_path / "net", birds, tmp_path / "svm")
    options = dataclasses.replace(ALONE, preprocessing="outside")
    report = export_model(tmp_path / "svm", birds, tmp_path / "new", options=options)
    assert report.parity["onnx"].relative < 1e-4
    metadata = read_metadata(tmp_path / "new" / "model.onnx")
    assert metadata["recipe"]["protocol"] == "svm"
    assert metadata["config"]["normalize"] == "l2"
    assert metadata["preprocessing"]["in_graph"] is False
    assert metadata["input"] == {"name": "images", "type": "float32", "shape": [None, 3, 64, 64]}
    assert TARGETS["onnx"].load(tmp_path / "new" / "model.onnx")(
        np.zeros((3, 3, 64, 64), np.float32)
    ).shape == (3, 6)


@pytest.mark.slow
def test_a_transformer_keeps_its_size(birds: Path, tmp_path: Path) -> None:
    model = create_model("test_vit", dim=8, num_classes=6, image_size=64)
    save_model(model, tmp_path / "net", classes=CLASSES)
    options = dataclasses.replace(ALONE, formats="onnx,onnx-float16,onnx-int8", free_size=True, calibration=6)
    report = export_model(tmp_path / "net", birds, tmp_path / "new", options=options, force=True)
    assert report.results["free_size"] is False
    far = [report.parity[name].relative for name in ("onnx", "onnx-float16", "onnx-int8")]
    assert far == sorted(far)
    assert far[0] < 1e-4
    assert far[1] < 0.02
    assert far[2] < 0.5
    assert read_metadata(tmp_path / "new" / "model.onnx")["input"]["shape"] == [None, 64, 64, 3]
    run = TARGETS["onnx"].load(tmp_path / "new" / "model.onnx")
    for batch in (1, 3, 8):
        assert run(np.zeros((batch, 64, 64, 3), np.uint8)).shape == (batch, 6)


def test_the_recipe_of_a_bundle_does_not_choose_what_is_opened(
    prepared: Prepared, bundle: Path, birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(load_model(bundle), tmp_path / "net", recipe={"data": {"path": str(tmp_path / "other")}})
    reuse(monkeypatch, prepared)
    report = export_model(tmp_path / "net", birds, tmp_path / "new", options=ALONE)
    assert report.results["arguments"]["data"] == str(birds)


def test_split_and_limit_choose_the_images(
    prepared: Prepared, bundle: Path, birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reuse(monkeypatch, prepared)
    options = dataclasses.replace(ALONE, split="train", limit=7)
    report = export_model(bundle, birds, tmp_path / "new", options=options)
    assert report.results["data"]["split"] == "train"
    assert report.parity["onnx"].images == 7


def test_an_earlier_export_alone_is_replaced(bundle: Path, birds: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="holds other files: use a new --out, or that of an earlier export"):
        export_model(bundle, birds, tmp_path)
    with pytest.raises(ValueError, match="is a file: use another --out"):
        export_model(bundle, birds, tmp_path / "thesis.txt")


def test_mistakes_are_found_before_anything_is_traced(
    bundle: Path, birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.export.exporting.trace_model", None)
    with pytest.raises(ValueError, match="there is no such folder"):
        export_model(tmp_path / "nothing", birds, tmp_path / "new")
    save_model(create_model("test_resnet", dim=4, num_classes=0), tmp_path / "headless")
    with pytest.raises(ValueError, match="has no classifier, so there are no logits to compare"):
        export_model(tmp_path / "headless", birds, tmp_path / "new")
    shutil.copytree(birds / "test", tmp_path / "only" / "test")
    with pytest.raises(ValueError, match="train"):
        export_model(bundle, tmp_path / "only", tmp_path / "new", options=OPTIONS)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"formats": ()}, "formats must name at least one of onnx, onnx-float16, onnx-int8, torch"),
        ({"formats": ("coreml",)}, "formats must be one of"),
        ({"preprocessing": "beside"}, "preprocessing must be one of"),
        ({"rounds": 0}, "rounds must be"),
        ({"limit": 0}, "limit must be"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ExportOptions(**options)  # type: ignore[arg-type]


def test_metadata_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"not a graph at all")
    with pytest.raises(ValueError, match="is not an ONNX file"):
        read_metadata(tmp_path / "a.onnx")
    (tmp_path / "a.pt2").write_bytes(b"nor this")
    with pytest.raises(ValueError, match=r"is not a torch.export file"):
        read_metadata(tmp_path / "a.pt2")
    onnx.save(onnx.ModelProto(ir_version=10), tmp_path / "b.onnx")
    with pytest.raises(ValueError, match="was not exported by covpool"):
        read_metadata(tmp_path / "b.onnx")
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / "c.onnx")
