"""Weight files: which are read, which are refused with which error, and how names map to timm's."""

from __future__ import annotations

import os
import pickle
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import covpool
from covpool.errors import CheckpointError
from covpool.models.weights import load_backbone, read_state_dict

NAME = "test_resnet"  # a small network that timm uses for its own tests


def network(**options: Any) -> nn.Module:
    return timm.create_model(NAME, num_classes=0, **options)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """Return weights of a network with a classifier. They all differ from those of a new network."""
    model = timm.create_model(NAME, num_classes=5)
    return {n: torch.rand(t.shape) if t.is_floating_point() else t + 3 for n, t in model.state_dict().items()}


def save(content: object, folder: Path) -> Path:
    path = folder / "weights.pth"
    torch.save(content, path)
    return path


def assert_loaded(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch(
    tmp_path: Path, weights: dict[str, Tensor], wrapper: str | None, zipped: bool
) -> None:
    content = weights if wrapper is None else {wrapper: weights, "epoch": 3, "best": torch.tensor(0.5)}
    path = tmp_path / "weights.pth"
    torch.save(
        content, path, _use_new_zipfile_serialization=zipped
    )  # files from before torch 1.6 are not zip archives
    read = read_state_dict(path)
    assert list(read) == list(weights)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_safetensors(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    read = read_state_dict(str(path))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


class RunsCode:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_file_is_run(tmp_path: Path, zipped: bool) -> None:
    trap = tmp_path / "trap"
    path = tmp_path / "weights.pth"
    content = {"state_dict": {"a": torch.zeros(1)}, "hook": RunsCode(trap)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"mkdir\), and reading that can run any code"):
        read_state_dict(path)
    assert not trap.exists()
    torch.load(path, weights_only=False)  # unsafe loading does run the code
    assert trap.exists()


def test_bare_pickle_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(pickle.dumps(RunsCode(tmp_path / "trap")))
    with pytest.raises(CheckpointError):
        read_state_dict(path)
    assert not (tmp_path / "trap").exists()


def test_whole_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\(torch\.nn\.modules\.linear\.Linear\).*state_dict alone$"):
        read_state_dict(save(nn.Linear(2, 2), tmp_path))


def torchscript() -> bytes:
    with warnings.catch_warnings(action="ignore"):  # deprecated, but such files exist
        return torch.jit.script(nn.Linear(2, 2)).save_to_buffer()


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-30],
    "one byte": lambda content: content[:1],
    "text": lambda content: b"<!DOCTYPE html> 404 Not Found\n" * 20,
    "photo": lambda content: b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(range(256)),
    "noise": lambda content: torch.randint(256, (5000,), dtype=torch.uint8).numpy().tobytes(),
    "torchscript": lambda content: torchscript(),
}


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_and_foreign_files(
    tmp_path: Path, weights: dict[str, Tensor], name: str, damage: str
) -> None:
    path = tmp_path / name
    if name == "weights.pth":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    path.write_bytes(DAMAGED[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match="is not a checkpoint, or not all of one") as caught:
        read_state_dict(path)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__  # no traceback from inside torch


def test_foreign_zip(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_state_dict(path)


@pytest.mark.parametrize("start", [b"c", b"X" + (1 << 29).to_bytes(4, "little")], ids=["line", "text"])
def test_texts_of_a_pickle_have_a_limit(tmp_path: Path, start: bytes) -> None:
    """Zeros at the end of a file take no space on a disk, but would in memory."""
    with (tmp_path / "weights.pth").open("wb") as file:
        file.write(b"\x80\x02" + start)
        file.truncate(1 << 29)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"neither safetensors|holds more than tensors \(\?"):
            read_state_dict(tmp_path / "weights.pth")
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file"):
        read_state_dict(tmp_path / "weights.pth")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list, not tensors by name"),
        (torch.zeros(1), "holds a Tensor, not tensors by name"),
        ({}, "holds no tensors"),
        ({"state_dict": {}}, "holds no tensors"),
        ({"epoch": 3}, "holds a int as 'epoch' where a tensor with a name should be"),
        ({0: torch.zeros(1)}, "holds a Tensor as 0 where a tensor with a name should be"),
    ],
)
def test_content_other_than_tensors_by_name(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_state_dict(save(content, tmp_path))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_timms_own_names(tmp_path: Path, weights: dict[str, Tensor], prefix: str) -> None:
    model = network()
    load_backbone(model, save({prefix + n: t for n, t in weights.items()}, tmp_path))
    assert_loaded(model, weights)


def test_prefixes(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    model = network()
    file = {f"net.body.{n}": t for n, t in weights.items() if not n.startswith("fc.")}
    file |= {"net.body.head.weight": torch.zeros(3), "scale": torch.zeros(1)}
    # The longest prefix applies: net.body.head. is dropped, although net.body. also matches.
    load_backbone(model, save(file, tmp_path), {"net.body.": "", "net.body.head.": None, "scale": None})
    assert_loaded(model, weights)


def test_empty_prefix_stands_before_every_name(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    outer = nn.ModuleDict({"body": network()})
    file = {n: t for n, t in weights.items() if not n.startswith("fc.")}
    load_backbone(outer, save(file, tmp_path), {"": "body."})
    assert_loaded(outer["body"], weights)


@pytest.mark.parametrize("classifier", [True, False])
@pytest.mark.parametrize("counters", [True, False])
def test_order(tmp_path: Path, weights: dict[str, Tensor], classifier: bool, counters: bool) -> None:
    model = network()
    kept = {
        n: t
        for n, t in weights.items()
        if (classifier or not n.startswith("fc.")) and (counters or not n.endswith("num_batches_tracked"))
    }
    file = {f"tensor {i}": t for i, t in enumerate(kept.values())}
    load_backbone(model, save(file, tmp_path), "order")
    assert_loaded(model, model.state_dict() | kept)


def test_part_that_the_file_may_lack(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    model = network()
    kept = {n: t for n, t in weights.items() if not n.startswith("layer4.")}
    path = save(kept, tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks layer4\.0\.conv1\.weight"):
        load_backbone(model, path)
    load_backbone(model, path, optional=["layer4"])
    assert_loaded(model, model.state_dict() | kept)


def test_safetensors_has_no_order(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    with pytest.raises(CheckpointError, match="in order: safetensors keeps none"):
        load_backbone(network(), path, "order")


def test_file_from_before_batchnorm_counted(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    model = network()
    old = {n: t for n, t in weights.items() if not n.endswith("num_batches_tracked")}
    load_backbone(model, save(old, tmp_path))
    assert_loaded(model, model.state_dict() | old)


def test_two_classifiers_of_a_distilled_transformer(tmp_path: Path) -> None:
    name = "deit_tiny_distilled_patch16_224"
    file = timm.create_model(name, num_classes=3).state_dict()
    assert "head_dist.weight" in file
    model = timm.create_model(name, num_classes=0)
    load_backbone(model, save(file, tmp_path))
    assert_loaded(model, file)


def without(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if n not in names}


def bias_first(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same weights with a bias and a weight of equal shape swapped in order."""
    names = list(weights)
    i, j = names.index("bn1.weight"), names.index("bn1.bias")
    names[i], names[j] = names[j], names[i]
    return {name: weights[name] for name in names}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], Any, str]] = {
    "missing": (
        lambda w: without(w, "layer1.0.conv1.weight"),
        None,
        r"does not fit ResNet: it lacks layer1\.0\.conv1\.weight$",
    ),
    "surplus": (
        lambda w: w | {f"extra.{i}": torch.zeros(1) for i in range(5)},
        None,
        r"it has a surplus of extra\.0, extra\.1, extra\.2 and 2 more$",
    ),
    "shape": (
        lambda w: w | {"layer1.0.bn1.weight": torch.zeros(3)},
        None,
        r"it has in another shape layer1\.0\.bn1\.weight \(3 for 32\)$",
    ),
    "all at once": (
        lambda w: without(w, "bn1.bias") | {"extra": torch.zeros(1), "bn1.weight": torch.zeros(())},
        None,
        r"lacks bn1\.bias, and has a surplus of extra, and has in another shape bn1\.weight \(a number for",
    ),
    "prefix": (
        lambda w: {f"net.body.{n}": t for n, t in w.items()},
        None,
        r"its names begin with 'net\.body\.': pass key_map=\{\"net\.body\.\": \"\"\}$",
    ),
    "prefix, and others beside it": (
        lambda w: (
            {f"net.body.{n}": t for n, t in w.items()}
            | {"net.head.bias": torch.ones(1), "eps": torch.ones(1)}
        ),
        None,
        r"pass key_map=\{\"net\.body\.\": \"\", \"net\.head\.\": None, \"eps\": None\}$",
    ),
    "prefix behind DataParallel's": (
        lambda w: {f"module.net.{n}": t for n, t in w.items()},
        None,
        r"pass key_map=\{\"module\.net\.\": \"\"\}$",
    ),
    "names": (
        lambda w: {f"tensor {i}": t for i, t in enumerate(w.values())},
        None,
        r"its shapes agree from first to last: pass key_map=\"order\" if only the names differ$",
    ),
    "prefix misspelt": (lambda w: w, {"modul.": ""}, r"prefix 'modul\.'.*its first name is conv1\.0\.weight"),
    "collision": (
        lambda w: w | {"other.conv1.0.weight": torch.zeros(1)},
        {"other.": ""},
        r"two tensors for conv1\.0\.weight, one of them other\.conv1\.0\.weight",
    ),
    "prefix that leaves something": (
        lambda w: w,
        {"layer1.": "layer9."},
        r"lacks .* and has a surplus of layer9",
    ),
    "order, too few": (
        lambda w: without(w, "fc.weight", "fc.bias", "bn1.bias"),
        "order",
        r"the network \d+ with",
    ),
    "order, too many": (lambda w: w | {"extra": torch.zeros(1)}, "order", r"in order: it has \d+ tensors"),
    "order, alike in shape": (
        bias_first,
        "order",
        r"in order: bn1\.bias, 32, would become bn1\.weight, 32$",
    ),
    "order, another": (
        lambda w: dict(reversed(w.items())),
        "order",
        r"in order: fc\.bias, 5, would become conv1\.0\.weight, 16×3×3×3$",
    ),
}


@pytest.mark.parametrize("fault", MISFITS)
def test_misfits_are_named_in_one_sentence(tmp_path: Path, weights: dict[str, Tensor], fault: str) -> None:
    change, key_map, message = MISFITS[fault]
    path = save(change(weights), tmp_path)
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        load_backbone(model, path, key_map)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_loaded(model, before)  # nothing was loaded


def test_key_map_of_another_kind(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"key_map must be .* got 'ordered'"):
        load_backbone(network(), save(weights, tmp_path), "ordered")  # type: ignore[arg-type]


@pytest.mark.parametrize("key_map", [None, "order"])
def test_create_model_loads_it_into_its_backbone(
    tmp_path: Path, weights: dict[str, Tensor], key_map: Any
) -> None:
    path = save(weights, tmp_path)
    model = covpool.create_model(NAME, dim=8, num_classes=2, checkpoint_path=path, key_map=key_map)
    assert_loaded(model.backbone, weights)
