"""A bundle gives back the model to the bit, and what is not a whole bundle is refused with the reason."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import covpool
from covpool.models import PooledClassifier
from covpool.models.bundles import BundleError, load_model, read_card, save_model
from covpool.models.bundles import bundle as bundle_module
from covpool.models.bundles import card as card_module
from covpool.models.bundles import tensors as tensors_module
from tests.models.bundles.samples import (
    CLASSES,
    all_tensors,
    edit_card,
    edit_weights,
    images,
    put_weights,
    trained,
)

SOURCE = Path(covpool.__file__).parent


@pytest.fixture(scope="module")
def model() -> PooledClassifier:
    torch.manual_seed(0)
    return trained()


@pytest.fixture(scope="module")
def saved(model: PooledClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    metrics, recipe = {"top1": 0.75, "per class": [1.0, 0.5, 0.75]}, {"optimizer": {"name": "sgd", "lr": 0.1}}
    folder = tmp_path_factory.mktemp("saved") / "birds"
    return save_model(model, folder, classes=CLASSES, metrics=metrics, recipe=recipe)


@pytest.fixture(scope="module")
def other() -> PooledClassifier:
    """Of the same shape."""
    torch.manual_seed(1)
    return trained()


@pytest.fixture
def bundle(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "birds"))


def assert_refused(folder: Path, reason: str) -> None:
    for read in (load_model, read_card):
        with pytest.raises(BundleError, match=reason) as caught:
            read(folder)
        message = str(caught.value)
        assert message.startswith(f"bundle {str(folder)!r}: ")
        assert message.isprintable()
        assert len(message) < 1000


def assert_not_loaded(folder: Path, reason: str) -> None:
    """What only the network can tell; the card in itself is in order."""
    read_card(folder)
    with pytest.raises(BundleError, match=reason):
        load_model(folder)


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    assert all_tensors(found).keys() == all_tensors(wanted).keys()
    for name, tensor in all_tensors(wanted).items():
        other = all_tensors(found)[name]
        assert other.dtype == tensor.dtype, name
        assert torch.equal(bits(other), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare by: zeros have a sign, and NaN is not equal to itself."""
    return tensor.detach().flatten().contiguous().view(torch.uint8)


# Round trip


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("resnet10t", {"dim": 16, "image_size": 64}),
        ("test_vit", {"dim": 16, "join": "cls", "rank": 4}),
        ("test_vit", {"dim": 16, "join": "cls", "normalize": "l2"}),
        # Its rotary embedding is a buffer that is computed, not saved, and is cast with the rest.
        ("eva02_tiny_patch14_224", {"backbone_options": {"depth": 1}, "image_size": 56}),
        ("test_byobnet", {"pool": "gap", "num_classes": 0}),
        slow("alexnet", {"head": "mlp", "hidden": (8,), "hidden_batchnorm": True, "image_size": 96}),
        slow("test_efficientnet", {"pool_options": {"steps": 3, "compute_dtype": torch.bfloat16}}),
    ],
)
def test_round_trip_is_exact(
    backbone: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = trained(backbone=backbone, **options).to(dtype)
    loaded = load_model(save_model(model, tmp_path / "model"))
    assert not loaded.training
    assert_same(loaded, model)
    x = images(model)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert loaded.pretrained_cfg == model.pretrained_cfg | timm.data.resolve_model_data_config(model)
    assert loaded.config.to_dict() == card_module.plain_json("config", model.config.to_dict())


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = trained()
    model.backbone.bfloat16()
    model.head.double()
    assert_same(load_model(save_model(model, tmp_path / "model")), model)


def test_bits_that_are_no_ordinary_numbers_survive(tmp_path: Path) -> None:
    model = trained()
    weight = model.head.classifier.weight.data
    weight.view(-1)[:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    assert_same(load_model(save_model(model, tmp_path / "model")), model)


def test_tensors_that_share_or_stride_memory_are_saved(tmp_path: Path) -> None:
    model = trained(backbone="test_resnet").to(memory_format=torch.channels_last)
    block = model.backbone.layer1[0]
    block.bn1.weight = block.bn2.weight
    assert not model.backbone.conv1[0].weight.is_contiguous()
    loaded = load_model(save_model(model, tmp_path / "model"))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_card_from_before_there_was_normalize(bundle: Path, model: PooledClassifier) -> None:
    edit_card(bundle, lambda fields: fields["config"].pop("normalize"))
    loaded = load_model(bundle)
    assert loaded.config == model.config
    assert_same(loaded, model)


def test_loading_draws_no_random_numbers(saved: Path) -> None:
    state = torch.get_rng_state()
    load_model(saved)
    assert torch.equal(torch.get_rng_state(), state)


def test_loading_ignores_the_callers_defaults(saved: Path) -> None:
    with torch.device("meta"):
        loaded = load_model(saved)
    assert_same(loaded, load_model(saved))


def test_loaded_model_trains(saved: Path) -> None:
    model = load_model(saved).train()
    model(images(model)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_card_tells_what_was_saved(saved: Path, model: PooledClassifier) -> None:
    card = read_card(saved)
    assert card.classes == CLASSES
    assert card.metrics == {"top1": 0.75, "per class": [1.0, 0.5, 0.75]}
    assert card.recipe == {"optimizer": {"name": "sgd", "lr": 0.1}}
    assert card.preprocessing == timm.data.resolve_model_data_config(model)
    assert card.versions.keys() == {"python", "torch", "timm", "covpool"}
    assert (card.config.backbone, card.config.pool, card.config.dim) == ("test_vit", "isqrt_cov", 8)


def test_card_is_for_people_too(saved: Path) -> None:
    assert '"Zaunkönig"' in (saved / "covpool.json").read_text(encoding="utf-8")


def test_a_bundle_is_two_files(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["covpool.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == ["birds"]


def test_saving_again_gives_the_same_files(saved: Path, tmp_path: Path) -> None:
    card = read_card(saved)
    again = save_model(load_model(saved), tmp_path / "again", metrics=card.metrics, recipe=card.recipe)
    for name in ("covpool.json", "model.safetensors"):
        assert (again / name).read_bytes() == (saved / name).read_bytes()


def test_preprocessing_of_the_bundle_wins_over_that_of_timm(bundle: Path) -> None:
    edit_card(bundle, lambda fields: fields["preprocessing"].update(crop_pct=0.5, mean=[0.1, 0.2, 0.3]))
    model = load_model(bundle)
    assert model.pretrained_cfg["crop_pct"] == 0.5
    assert timm.data.resolve_model_data_config(model)["mean"] == (0.1, 0.2, 0.3)


# Saving


def test_bundle_is_replaced(bundle: Path, other: PooledClassifier) -> None:
    save_model(other, bundle)
    loaded = load_model(bundle)
    assert_same(loaded, other)
    assert loaded.classes is None
    assert [path.name for path in bundle.parent.iterdir()] == ["birds"]


def test_empty_folder_and_folder_that_is_a_link_are_filled(model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_model(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_card(tmp_path / "real").config == model.config


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", ".git"])
def test_folder_of_something_else_is_left_alone(name: str, model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(BundleError, match="save to a new or an empty one"):
        save_model(model, tmp_path)
    assert (tmp_path / name).read_text() == "precious"


def test_bundle_with_something_else_beside_it_is_left_alone(bundle: Path, other: PooledClassifier) -> None:
    (bundle / "notes.txt").write_text("precious")
    with pytest.raises(BundleError, match=r"such as 'notes\.txt'"):
        save_model(other, bundle)
    assert read_card(bundle).classes == CLASSES


def test_file_is_left_alone(model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BundleError, match="there is a file of this name"):
        save_model(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"classes": ["a", "b"]}, BundleError, "it names 2 classes, but its model has 3"),
        ({"classes": "abc"}, TypeError, "classes must be a list of strings"),
        ({"classes": [0, 1, 2]}, TypeError, "classes must be a list of strings"),
        ({"classes": ["a", "b", "\udcff"]}, ValueError, r"classes\[2\] is '\\udcff', which is no text"),
        (
            {"metrics": {"top1": torch.tensor(0.5)}},
            TypeError,
            r"metrics\['top1'\] .* got Tensor: pass its .tolist\(\)",
        ),
        (
            {"recipe": {"stages": [{"f": print}]}},
            TypeError,
            r"recipe\['stages'\]\[0\]\['f'\] must be numbers",
        ),
        ({"recipe": {3: "x"}}, TypeError, "recipe must have strings as keys; got 3"),
    ],
)
def test_mistakes_in_saving_cost_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str, bundle: Path, other: PooledClassifier
) -> None:
    with pytest.raises(error, match=message):
        save_model(other, bundle, **arguments)
    assert read_card(bundle).classes == CLASSES


def test_metric_that_is_no_number_does_not_cost_the_model(model: PooledClassifier, tmp_path: Path) -> None:
    save_model(model, tmp_path / "model", metrics={"loss": float("nan"), "worst": (float("inf"), 1)})
    assert read_card(tmp_path / "model").metrics == {"loss": None, "worst": [None, 1]}


def test_model_that_its_config_does_not_describe_is_not_saved(bundle: Path) -> None:
    model = trained()
    model.head.classifier = nn.Linear(model.head.classifier.in_features, 4)
    with pytest.raises(
        BundleError, match=r"changed after it was made.*'head.classifier.(weight|bias)' has shape"
    ):
        save_model(model, bundle)
    model.head.classifier = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        BundleError, match=r"changed after it was made.*'head.classifier.bias', which is not among"
    ):
        save_model(model, bundle)
    assert read_card(bundle).classes == CLASSES


def test_wrapped_and_foreign_models_are_not_saved(model: PooledClassifier, tmp_path: Path) -> None:
    for wrong in (nn.Linear(2, 2), nn.DataParallel(model)):
        with pytest.raises(TypeError, match=r"pass the model itself where it is wrapped"):
            save_model(wrong, tmp_path / "model")
    with torch.device("meta"), pytest.raises(BundleError, match="not an ordinary tensor"):
        save_model(covpool.models.create_model("test_resnet", dim=8), tmp_path / "model")
    assert not list(tmp_path.iterdir())


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_full_disk_leaves_the_old_bundle(bundle: Path, other: PooledClassifier) -> None:
    size = (bundle / "model.safetensors").stat().st_size
    for limit in (0, size // 2, size - 1):
        with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError, match="File too large"):
            save_model(other, bundle)
        assert [path.name for path in bundle.parent.iterdir()] == ["birds"]
        assert read_card(bundle).classes == CLASSES
    load_model(bundle)


@pytest.mark.slow
def test_a_kill_while_saving_leaves_a_bundle(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.models.bundles.overwriting", str(tmp_path), "30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=SOURCE.parents[1])
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["kills"] == 30
    assert told["seen"] > 5, "the kills came before anything was saved"
    assert told["left behind"], "no kill came in the middle of saving"


# Damage


def test_weights_cut_short_are_refused(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    for sixteenth in range(16):
        (bundle / "model.safetensors").write_bytes(data[: sixteenth * len(data) // 16])
        assert_refused(bundle, rf"cut short, \d+ bytes of {len(data)}: copy it anew")
    (bundle / "model.safetensors").write_bytes(data + b"\0")
    assert_refused(bundle, "do not belong together")


def test_weights_cut_short_with_a_card_that_says_so_are_refused(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    for length in (0, 7, 8, 1000, len(data) // 2, len(data) - 1):
        put_weights(bundle, data[:length])
        assert_not_loaded(bundle, "not a safetensors file")


def test_a_flipped_bit_of_the_weights_is_found(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    for place in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        spoilt = bytearray(data)
        spoilt[place] ^= 1
        (bundle / "model.safetensors").write_bytes(spoilt)
        assert_refused(bundle, "its hash differs")


def test_every_flipped_bit_of_the_card_is_found(saved: Path) -> None:
    data = (saved / "covpool.json").read_bytes()
    for place in range(len(data) - 1):  # the last is the end of the line, and says nothing
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << place % 8
        # Between tokens one space is as good as another.
        if data[place : place + 1].isspace() and spoilt[place : place + 1].isspace():
            continue
        with pytest.raises(BundleError):
            card_module.read_fields(bytes(spoilt))


def test_every_cut_of_the_card_is_found(saved: Path) -> None:
    data = (saved / "covpool.json").read_bytes()
    card_module.read_fields(data)
    for length in range(len(data.rstrip())):
        with pytest.raises(BundleError, match="cut short or not JSON"):
            card_module.read_fields(data[:length])


def test_edited_class_is_found(bundle: Path) -> None:
    edit_card(bundle, lambda fields: fields["classes"].__setitem__(0, "Crow"), rehash=False)
    assert_refused(bundle, "edited after it was written")


def test_reformatted_card_is_the_same_card(bundle: Path) -> None:
    edit_card(bundle, lambda fields: None, rehash=False)
    assert load_model(bundle).classes == CLASSES


def test_weights_of_another_bundle_are_refused(bundle: Path, other: PooledClassifier) -> None:
    folder = save_model(other, bundle.parent / "other")
    shutil.copy(folder / "model.safetensors", bundle)
    assert_refused(bundle, "not the one of this card")


# Foreign files


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short or not JSON"),
        (b"\x80\x04N.", "not JSON: 'utf-8' codec"),
        ('{"format": "Käse"}'.encode("latin-1"), "not JSON: 'utf-8' codec"),
        (b'\xef\xbb\xbf{"format": "covpool"}', "not JSON"),
        (b"[1, 2]", r"not a covpool card but \[1, 2\]"),
        (b"{}", "another program's: its format is None"),
        (b'{"format": "coverage pool", "version": 3}', "another program's: its format is 'coverage pool'"),
        (b'{"format": "\\u001b[2J"}', r"its format is '\\x1b\[2J'"),
        (b'{"format": "covpool"}', "no valid format_version; got None"),
        (b'{"format": "covpool", "format_version": true}', "no valid format_version; got True"),
        (b'{"format": "covpool", "format_version": 1}', "its hash differs"),
        (b'{"format": "covpool", "format": "covpool"}', "a name comes twice"),
        (b'{"format": "covpool", "metrics": NaN}', "NaN is no number of JSON"),
        (b'{"format": "covpool", "metrics": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"format": "covpool", "metrics": 1e999}', "1e999 is no number of JSON"),
        (b'{"format": "\\ud800"}', "not JSON: 'utf-8' codec"),
        (b'{"format": ' + b"[" * 100_000, "lists within lists"),
        (b'{"format": "covpool", "format_version": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"format": "' + b"x" * (card_module.MAX_BYTES + 1), "larger than 16 MiB"),
    ],
)
def test_foreign_cards_are_refused(content: bytes, reason: str, bundle: Path) -> None:
    (bundle / "covpool.json").write_bytes(content)
    assert_refused(bundle, reason)


class Intruder:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _intrude, (str(self.path), "intruded")


def _intrude(path: str, text: str) -> None:
    Path(path).write_text(text)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_pickles_are_refused_and_not_run(how: str, bundle: Path, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "pickle"
    if how == "pickle":
        file.write_bytes(pickle.dumps(Intruder(trace)))
    else:
        torch.save({"weight": Intruder(trace)}, file)
    put_weights(bundle, file.read_bytes())
    assert_not_loaded(bundle, "not a safetensors file")
    (bundle / "covpool.json").write_bytes(file.read_bytes())
    assert_refused(bundle, "not JSON")
    assert not trace.exists()
    pickle.loads(pickle.dumps(Intruder(trace)))
    assert trace.exists(), "the intruder is harmless, and the test with it"


@pytest.mark.parametrize(
    ("readable_by", "remedy"),
    [
        ("0.9.0", "pip install 'covpool>=0.9.0'$"),
        ("1.0rc1", "pip install 'covpool>=1.0rc1'$"),
        ("0'; rm -rf ~ #", "pip install --upgrade covpool$"),
        (None, "pip install --upgrade covpool$"),
    ],
)
def test_newer_format_says_which_covpool_reads_it(readable_by: object, remedy: str, bundle: Path) -> None:
    # The hash of a newer format may be another: the version comes first.
    newer = {"format_version": 3, "written_by": "0.9.1", "readable_by": readable_by, "hash": "sha3:0"}
    edit_card(bundle, lambda fields: fields.update(newer), rehash=False)
    here = f"this covpool {re.escape(covpool.__version__)} reads up to format 1"
    assert_refused(bundle, rf"written in bundle format 3 by covpool 0\.9\.1; {here}: {remedy}")


def test_missing_things_are_named(bundle: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "there is no such folder")
    assert_refused(bundle / "covpool.json", "there is no such folder")
    (bundle / "model.safetensors").unlink()
    assert_refused(bundle, r"there is no model\.safetensors in it")
    (bundle / "covpool.json").unlink()
    assert_refused(bundle, r"there is no covpool\.json in it")


# Cards of someone who means it: the hashes are right


def set_config(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields["config"].update(values)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda f: f["classes"].append("fourth"), "it names 4 classes, but its model has 3"),
        (lambda f: f.update(classes=[1, 2, 3]), r"'classes' of covpool.json is \[1, 2, 3\], not list\[str\]"),
        (lambda f: f.update(extra=1), "covpool.json has a field 'extra', which this covpool"),
        (lambda f: f.pop("metrics"), "covpool.json has no field 'metrics'"),
        (lambda f: f.update(metrics=[]), "'metrics' of covpool.json"),
        (lambda f: f.update(versions={"torch": 2}), "'versions' of covpool.json"),
        (
            lambda f: f["weights"].update(file="../other.safetensors"),
            "'file' of weights is '../other.safetensors'",
        ),
        (lambda f: f["weights"].update(file="/etc/passwd"), "'file' of weights is '/etc/passwd'"),
        (lambda f: f["weights"].update(bytes=-1), "do not belong together"),
        (lambda f: f["weights"].update(bytes=1.5), "'bytes' of weights is 1.5, not int"),
        (lambda f: f["weights"].update(buffer_dtypes={"x": "int8"}), "'buffer_dtypes' of weights"),
        (lambda f: f["preprocessing"].update(input_size=[3, 10**9, 10**9]), "preprocessing has 1000000000"),
        (lambda f: f["preprocessing"].update(input_size=[3, 0, 0]), "preprocessing has not three sizes"),
        (lambda f: f["preprocessing"].update(std=[0.0, 0.0, 0.0]), "preprocessing has not three sizes"),
        (lambda f: f["preprocessing"].update(interpolation="/etc/passwd"), "'/etc/passwd', which is no name"),
        (lambda f: f["config"].pop("backbone"), "config has no field 'backbone'"),
        (set_config(num_classes="3"), "'num_classes' of config is '3', not int"),
        (set_config(num_classes=True), "'num_classes' of config is True, not int"),
        (set_config(dim=8.0), "'dim' of config is 8.0, not "),
        (set_config(hidden="abc"), "'hidden' of config is 'abc'"),
        (set_config(pool="rm -rf"), "its config is refused: pool must be one of"),
        (set_config(head="svm"), "'head' of config is 'svm'"),
        (set_config(quantum=True), "config has a field 'quantum'"),
        (set_config(image_size=10**9), "image_size has 1000000000, but nothing in it can be above"),
        (set_config(pool_options={"steps": 10**9}), "pool_options has 1000000000"),
        (set_config(backbone_options={"depth": 10**9}), "backbone_options has 1000000000"),
        (set_config(backbone_options={"depths": [1, [2, 10**9]]}), "backbone_options has 1000000000"),
        (set_config(backbone_options={"act_layer": "os:system"}), "backbone_options has 'os:system'"),
    ],
)
def test_cards_that_make_no_sense_are_refused(
    edit: Callable[[dict[str, Any]], object], reason: str, bundle: Path
) -> None:
    edit_card(bundle, edit)
    assert_refused(bundle, reason)


@pytest.fixture
def _nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("it should have been refused by now")

    for module in (bundle_module, tensors_module):
        monkeypatch.setattr(module, "build_model", refuse)


@pytest.mark.usefixtures("_nothing_is_built")
@pytest.mark.parametrize(
    "backbone",
    [
        "hf-hub:stranger/model",
        "hf_hub:stranger/model",
        "local-dir:/tmp/model",
        "stranger/resnet18",
        "../resnet18",
        "https://example.com/resnet18",
        "resnet18.hf-hub:stranger/model",
        "resnet18\n",
        "",
    ],
)
def test_backbones_are_plain_names(backbone: str, bundle: Path) -> None:
    edit_card(bundle, set_config(backbone=backbone))
    assert_refused(bundle, "is not the plain name of a network of timm")


@pytest.mark.usefixtures("_nothing_is_built")
@pytest.mark.parametrize(
    "option",
    [
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "pretrained_strict",
        "pretrained_filter_fn",
        "checkpoint_path",
        "cache_dir",
        "model_cfg",
        "feature_cfg",
        "features_only",
        "feature_cls",
        "kwargs_filter",
        "__class__",
        "a b",
    ],
)
def test_options_that_read_or_fetch_are_refused(option: str, bundle: Path) -> None:
    edit_card(bundle, set_config(backbone_options={option: True}))
    assert_refused(bundle, f"its backbone_options have '{option}', which no bundle may set")


def test_every_name_of_timm_is_plain() -> None:
    names = [*timm.list_models(), *timm.list_pretrained()]
    assert len(names) > 1000
    assert not [name for name in names if not re.fullmatch(card_module.PLAIN_NAME, name)]


def test_unknown_backbone_is_refused_with_the_versions(bundle: Path) -> None:
    def edit(fields: dict[str, Any]) -> None:
        fields["config"]["backbone"] = "resnet_of_tomorrow"
        fields["versions"]["timm"] = "9.9.9\x1b"

    edit_card(bundle, edit)
    assert_not_loaded(
        bundle, r"timm has no backbone 'resnet_of_tomorrow'.*saved with .*timm 9\.9\.9\?.*here are"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the memory in use")
@pytest.mark.parametrize(
    "config",
    [
        {"dim": 10**9},
        {"dim": 100_000},
        {"dim": 10**30},
        {"rank": 10**12},
        {"num_classes": 10**11},
        {"head": "mlp", "hidden": [10**6, 10**6]},
        {"dim": -1},
        {"dim": 0},
    ],
)
def test_enormous_networks_are_refused_without_being_built(config: dict[str, Any], bundle: Path) -> None:
    load_model(bundle)  # what is imported on first use takes room too

    def edit(fields: dict[str, Any]) -> None:
        fields["classes"] = None
        fields["config"].update(config)

    edit_card(bundle, edit)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    start = time.monotonic()
    with limited(resource.RLIMIT_AS, used + 2**28):
        assert_not_loaded(bundle, "shape|cannot be built: (?!.*(allocate|memory))|not among its weights")
    assert time.monotonic() - start < 10


def test_endless_networks_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "MAX_CALLS", 5000)
    load_model(bundle)
    edit_card(bundle, set_config(head="mlp", hidden=[1] * 10**5))
    start = time.monotonic()
    assert_not_loaded(bundle, "more layers than any network of timm")
    assert time.monotonic() - start < 5


def test_computed_buffers_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"backbone_options": {"depth": 1}, "image_size": 56}
    folder = save_model(trained(backbone="eva02_tiny_patch14_224", **options), tmp_path / "model")
    monkeypatch.setattr(tensors_module, "MAX_COMPUTED_BYTES", 1000)
    assert_not_loaded(folder, "GiB beside its weights")


def test_huge_hollow_weights_are_not_read(bundle: Path) -> None:
    with (bundle / "model.safetensors").open("r+b") as file:
        file.truncate(2**38)
    edit_card(bundle, lambda fields: fields["weights"].update(bytes=2**38))
    with pytest.raises(BundleError, match="far larger than the network"):
        load_model(bundle)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t.update(extra=torch.zeros(1)), "its weights have 'extra', which is not in the network"),
        (
            lambda t: t.pop("head.classifier.bias"),
            "has 'head.classifier.bias', which is not among its weights",
        ),
        (lambda t: t.update(renamed=t.pop("head.classifier.bias")), "which is not among its weights"),
        (
            lambda t: t.update({"head.classifier.bias": torch.zeros(4)}),
            r"has shape \(4,\) in its weights, \(3,\) in",
        ),
        (
            lambda t: t.update({"head.classifier.bias": torch.zeros(3, dtype=torch.int32)}),
            "is torch.int32 in its",
        ),
        (
            lambda t: t.update({"head.classifier.bias": torch.zeros(3, dtype=torch.complex64)}),
            "is torch.complex64",
        ),
    ],
)
def test_weights_of_another_network_are_refused(
    edit: Callable[[dict[str, torch.Tensor]], object], reason: str, bundle: Path
) -> None:
    edit_weights(bundle, edit)
    assert_not_loaded(bundle, reason)


def test_counter_cannot_become_a_fraction(tmp_path: Path) -> None:
    folder = save_model(trained(backbone="test_resnet"), tmp_path / "model")
    edit_weights(
        folder, lambda tensors: tensors.update({"backbone.bn1.num_batches_tracked": torch.tensor(1.0)})
    )
    assert_not_loaded(folder, "is torch.float32 in its weights, torch.int64 in the network")


def test_header_that_points_outside_its_data_is_refused(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["head.classifier.bias"]["data_offsets"] = [0, 12]
    text = json.dumps(header).encode()
    put_weights(bundle, len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert_not_loaded(bundle, "not a safetensors file")


# Links and other things that are not files


def test_cache_of_links_is_read(bundle: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in bundle.iterdir():
        (snapshot / path.name).symlink_to(f"../../birds/{path.name}")
    assert load_model(snapshot).classes == CLASSES


@pytest.mark.parametrize("name", ["covpool.json", "model.safetensors"])
def test_what_never_ends_is_refused(name: str, bundle: Path) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    assert_refused(bundle, f"its {name} is not a file")
    (bundle / name).unlink()
    (bundle / name).symlink_to("/dev/zero")
    assert_refused(bundle, f"its {name} is not a file")


def test_a_link_to_a_secret_tells_nothing(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2: [")
    (bundle / "covpool.json").unlink()
    (bundle / "covpool.json").symlink_to(tmp_path / "secret")
    assert_refused(bundle, r"^(?!.*hunter2).*not JSON")


# The package


PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def pickling(source: str) -> Iterator[str]:
    """What in it pickles or unpickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            yield from PICKLERS & {module.partition(".")[0] for module in modules}
        elif isinstance(node, ast.Call):
            function, options = ast.unparse(node.func), {ast.unparse(option) for option in node.keywords}
            if function == "torch.save" or "allow_pickle=True" in options:
                yield ast.unparse(node)
            if function == "torch.load" and "weights_only=True" not in options:
                yield ast.unparse(node)


def test_nothing_is_pickled_in_the_package() -> None:
    paths = list(SOURCE.rglob("*.py"))
    assert len(paths) > 20
    assert not {str(path): found for path in paths if (found := [*pickling(path.read_text("utf-8"))])}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import json, pickle as p",
        "from pickle import loads",
        "torch.save(model, path)",
        "torch.load(path)",
        "torch.load(open(path), weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_pickling_would_be_found(source: str) -> None:
    assert [*pickling(source)]
    assert not [*pickling("torch.load(str(path), weights_only=True); safetensors.torch.save(tensors)")]
