"""A new export target is one class and one entry in ``TARGETS``."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from covpool.export import ExportOptions, export_model, read_metadata
from covpool.export.graph import Array, Runner, onnx_session
from covpool.export.parity import Tolerance
from covpool.export.targets import TARGETS, Exportable, Target
from tests.export.conftest import Prepared, reuse


class OnnxText(Target):
    """ONNX in protobuf's text format."""

    name, file, precision = "onnx-text", "model.textproto", "float32"
    tolerance = Tolerance(top1=1.0, relative=1e-3)

    def write(self, model: Exportable, path: Path, metadata: Mapping[str, str]) -> None:
        written = onnx.ModelProto()
        written.CopyFrom(model.onnx)
        onnx.helper.set_model_props(written, dict(metadata))
        onnx.save(written, path, format="textproto")

    def load(self, path: Path) -> Runner:
        session = onnx_session(onnx.load(path, format="textproto").SerializeToString())

        def run(images: Array) -> Array:
            return np.asarray(session.run(None, {"images": images})[0])

        return run

    def read_metadata(self, path: Path) -> dict[str, str]:
        return {one.key: one.value for one in onnx.load(path, format="textproto").metadata_props}


def test_a_new_target_is_written_compared_and_reported(
    bundle: Path, birds: Path, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "onnx-text", OnnxText())
    reuse(monkeypatch, prepared)
    options = ExportOptions(formats="onnx-text", rounds=2)
    report = export_model(bundle, birds, tmp_path / "new", options=options)
    assert report.parity["onnx-text"].top1 == 1
    (file,) = json.loads((tmp_path / "new" / "results.json").read_text())["files"]
    assert (file["format"], file["file"], file["precision"]) == ("onnx-text", "model.textproto", "float32")
    assert read_metadata(tmp_path / "new" / "model.textproto")["precision"] == "float32"


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_targets_are_complete(target: Target) -> None:
    assert TARGETS[target.name] is target
    assert target.file.startswith("model")
    assert 0 < target.tolerance.top1 <= 1
    assert [other.file for other in TARGETS.values()].count(target.file) == 1


def test_the_metadata_of_an_onnx_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = onnx.ModelProto(ir_version=9, graph=onnx.GraphProto(doc_string="x" * 1000))
    onnx.helper.set_model_props(model, {"covpool": '"1"', "classes": '["wren"]'})
    path.write_bytes(model.SerializeToString())
    assert read_metadata(path) == {"covpool": "1", "classes": ["wren"]}
    onnx.helper.set_model_props(model, {"covpool": '"1"', "classes": f'["{"x" * (17 << 20)}"]'})
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="its metadata is too large"):
        read_metadata(path)
    path.write_bytes(b"\x72\0" * 200_000)
    with pytest.raises(ValueError, match="its metadata is too large"):
        read_metadata(path)
    for damaged in (model.SerializeToString()[:1000], b"\x72" + b"\x80" * 20 + b"\0"):  # a long number
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not an ONNX file"):
            read_metadata(path)


def test_the_metadata_of_a_torch_export_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/extra/covpool", '"1"')
    assert read_metadata(path) == {"covpool": "1"}
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/extra/classes", f'["{"x" * (17 << 20)}"]')
    assert path.stat().st_size < 1 << 17
    with pytest.raises(ValueError, match="its metadata is too large"):
        read_metadata(path)
