"""Checkpoints of the authors' code, recreated with the same names and shapes, and their logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from torch import Tensor

import covpool
from covpool.errors import CheckpointError
from covpool.models import PooledClassifier
from covpool.models.convert import convert_checkpoint
from tests.functional.tolerances import assert_close
from tests.models.weights.paper_networks import (
    R50,
    R101,
    R152,
    Weights,
    as_trained,
    resnet_logits,
    resnet_weights,
    vgg_logits,
    vgg_weights,
)

Save = Callable[[object], Path]


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Save]:
    path = tmp_path / "network.pth.tar"

    def write(content: object) -> Path:
        torch.save(content, path)
        return path

    yield write
    path.unlink()  # pytest would keep hundreds of megabytes
    shutil.rmtree(tmp_path / "bundle", ignore_errors=True)


@pytest.fixture(scope="module")
def resnet50() -> Weights:
    torch.manual_seed(0)
    return resnet_weights(R50, classes=6, dim=16)


@pytest.fixture(scope="module")
def vgg() -> Weights:
    torch.manual_seed(0)
    return vgg_weights(classes=6, dim=16, hidden=24)


def double(weights: Weights) -> Weights:
    return {name: t.double() if t.is_floating_point() else t for name, t in weights.items()}


def images(side: int = 64) -> Tensor:
    return torch.randn(2, 3, side, side, dtype=torch.float64)


@torch.no_grad()
def logits_of(model: PooledClassifier, x: Tensor) -> Tensor:
    return model.to(x.dtype).eval()(x)


def training_checkpoint(state_dict: Weights, arch: str) -> dict[str, Any]:
    """Return a checkpoint as the authors' main.py saves it: learning rate and best precision are tensors."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= torch.tensor(0.1, dtype=torch.float64)
    return {
        "epoch": 65,
        "arch": arch,
        "state_dict": state_dict,
        "best_prec1": torch.tensor(78.3),
        "optimizer": optimizer.state_dict(),
    }


def with_prefix(weights: Weights, part: str = "") -> Weights:
    """Insert ``module.`` after ``part``, as DataParallel does."""
    return {
        f"{part}module.{n.removeprefix(part)}" if n.startswith(part) else n: t for n, t in weights.items()
    }


@pytest.mark.slow
def test_released_resnet50_of_a_thousand_classes(save: Save) -> None:
    weights = resnet_weights(R50, classes=1000, dim=256)
    assert len(weights) == 326
    assert weights["fc.weight"].shape == (1000, 32896)
    model = convert_checkpoint(save(weights))
    assert sum(p.numel() for p in model.parameters()) == 56_929_832
    assert (model.config.backbone, model.config.dim, model.config.num_classes) == ("resnet50", 256, 1000)
    assert model.config.pool_options == {"iteration": "paper", "steps": 5}
    x = images()
    assert_close(logits_of(model, x), resnet_logits(double(weights), x))


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "name"), [(R101, "resnet101"), (R152, "resnet152")])
def test_depth_is_counted(save: Save, blocks: tuple[int, ...], name: str) -> None:
    weights = resnet_weights(blocks, classes=4, dim=8)
    model = convert_checkpoint(save(weights))
    assert model.config.backbone == name
    x = images(32)
    assert_close(logits_of(model, x), resnet_logits(double(weights), x))


FORMS: dict[str, Callable[[Weights], object]] = {
    "released": lambda w: w,
    "released, parallel": with_prefix,
    "from scratch": lambda w: training_checkpoint(
        with_prefix(as_trained(w, from_scratch=True), "features."), "mpncovresnet50"
    ),
    "from scratch, not parallel": lambda w: as_trained(w, from_scratch=True),
    "from scratch, distributed": lambda w: with_prefix(as_trained(w, from_scratch=True)),
    "fine-tuned": lambda w: training_checkpoint(
        with_prefix(as_trained(w, from_scratch=False), "features."), "mpncovresnet50"
    ),
    "fine-tuned, not parallel": lambda w: as_trained(w, from_scratch=False),
}


@pytest.fixture(scope="module")
def images_and_logits(resnet50: Weights) -> tuple[Tensor, Tensor]:
    x = images(32)
    return x, resnet_logits(double(resnet50), x)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if form in ("from scratch", "fine-tuned") else pytest.mark.slow)
        for form in FORMS
    ],
)
def test_every_form_of_a_resnet(
    save: Save, resnet50: Weights, images_and_logits: tuple[Tensor, Tensor], form: str
) -> None:
    model = convert_checkpoint(save(FORMS[form](resnet50)))
    assert model.config.keep_resolution
    x, expected = images_and_logits
    assert_close(logits_of(model, x), expected)


def test_resnet_that_is_not_the_papers_keeps_its_stride(save: Save, resnet50: Weights) -> None:
    # The authors' code also pools an ordinary ResNet. It has the same names, but its last stage has stride 2.
    checkpoint = training_checkpoint(as_trained(resnet50, from_scratch=True), "resnet50")
    model = convert_checkpoint(save(checkpoint))
    x = images()
    assert model.eval().forward_features(x.float()).shape[-2:] == (2, 2)
    assert_close(logits_of(model, x), resnet_logits(double(resnet50), x, last_stride=2))


def test_number_of_iterations(save: Save, resnet50: Weights) -> None:
    model = convert_checkpoint(save(resnet50), steps=3)
    x = images(32)
    assert_close(logits_of(model, x), resnet_logits(double(resnet50), x, steps=3))


@pytest.mark.parametrize("parallel", [False, True])
def test_vgg(save: Save, vgg: Weights, parallel: bool) -> None:
    checkpoint = training_checkpoint(with_prefix(vgg, "features."), "mpncovvgg16_bn") if parallel else vgg
    model = convert_checkpoint(save(checkpoint))
    assert (model.config.backbone, model.config.hidden) == ("vgg16_bn", (24, 24))
    assert [part.p for part in model.head.modules() if isinstance(part, torch.nn.Dropout)] == [0.5, 0.5]
    x = images()
    assert_close(logits_of(model, x), vgg_logits(double(vgg), x))


@pytest.mark.parametrize("dim", [None, 16])
def test_vgg_fine_tuned_has_one_linear_layer(save: Save, vgg: Weights, dim: int | None) -> None:
    numbers = 512 * 513 // 2 if dim is None else dim * (dim + 1) // 2
    dropped = ("classifier.", *(("representation.",) if dim is None else ()))
    weights = {name: t for name, t in vgg.items() if not name.startswith(dropped)}
    weights |= {"classifier.weight": torch.randn(3, numbers), "classifier.bias": torch.randn(3)}
    model = convert_checkpoint(save(weights))
    assert (model.config.head, model.config.dim, model.num_classes) == ("linear", dim, 3)
    x = images(32)
    assert_close(logits_of(model, x), vgg_logits(double(weights), x))


@pytest.mark.slow
def test_released_vgg_of_a_thousand_classes(save: Save) -> None:
    weights = vgg_weights(classes=1000, dim=256, hidden=4096)
    path = save(with_prefix(weights, "features."))
    x = images().float()  # in double precision it would take gigabytes
    expected = vgg_logits(weights, x)
    del weights
    model = convert_checkpoint(path)
    assert sum(p.numel() for p in model.parameters()) == 170_479_144
    assert_close(logits_of(model, x), expected)


def test_preprocessing_is_torchvisions(save: Save, vgg: Weights) -> None:
    settings = timm.data.resolve_model_data_config(convert_checkpoint(save(vgg)))
    assert settings["input_size"] == (3, 224, 224)
    assert settings["interpolation"] == "bilinear"
    assert settings["crop_pct"] == 0.875  # 224 of 256 pixels
    assert tuple(settings["mean"]) == (0.485, 0.456, 0.406)
    assert tuple(settings["std"]) == (0.229, 0.224, 0.225)


def test_model_can_be_trained_on(save: Save, vgg: Weights) -> None:
    model = convert_checkpoint(save(vgg))
    assert model.training
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model(images(32).float()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_bundle_of_it_gives_the_same(save: Save, vgg: Weights, tmp_path: Path) -> None:
    model = convert_checkpoint(save(vgg))
    loaded = covpool.load_model(covpool.save_model(model, tmp_path / "bundle"))
    assert loaded.config == model.config
    x = images(32)
    assert torch.equal(logits_of(loaded, x), logits_of(model, x))


def test_half_precision_becomes_single(save: Save, vgg: Weights) -> None:
    half = {name: t.half() if t.is_floating_point() else t for name, t in vgg.items()}
    model = convert_checkpoint(save(half))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_file_from_before_batchnorm_counted(save: Save, vgg: Weights) -> None:
    old = {name: t for name, t in vgg.items() if not name.endswith("num_batches_tracked")}
    model = convert_checkpoint(save(old))
    x = images(32)
    assert_close(logits_of(model, x), vgg_logits(double(vgg), x))


def changed(weights: Weights, **changes: Tensor | None) -> Weights:
    """Return a copy with tensors set, or removed by ``None``. ``__`` stands for the dot."""
    result = dict(weights)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del result[key]
        else:
            result[key] = tensor
    return result


REFUSED: dict[str, tuple[Callable[[Weights], object], str]] = {
    "surplus": (lambda w: changed(w, auxiliary__weight=torch.zeros(1)), r"surplus of auxiliary\.weight$"),
    "missing": (lambda w: changed(w, features__1__bias=None), r"lacks backbone\.features\.1\.bias$"),
    "no norm": (
        lambda w: {k: v for k, v in w.items() if "conv_dr_block.1" not in k},
        r"lacks pool\.reduction\.norm\.weight, pool\.reduction\.norm\.bias, .* and 1 more$",
    ),
    "shape": (
        lambda w: changed(w, features__3__weight=torch.zeros(64, 64, 1, 1)),
        r"another shape backbone\.features\.3\.weight \(64×64×1×1 for 64×64×3×3\)",
    ),
    "two classifiers": (
        lambda w: changed(w, classifier__weight=torch.zeros(6, 24)),
        r"two tensors for head\.classifier\.weight",
    ),
    "no classifier": (lambda w: changed(w, classifier__6__weight=None), "no known classifier"),
    "classifier of another shape": (
        lambda w: changed(w, classifier__0__weight=torch.zeros(7)),
        "no known classifier",
    ),
    "first order": (
        lambda w: changed(w, classifier__0__weight=torch.zeros(24, 25088)),
        r"no covariance pooling: its classifier takes 25088 .*create_model",
    ),
    "other d": (
        lambda w: changed(w, classifier__0__weight=torch.zeros(24, 45)),
        r"another shape pool\.reduction\.projection\.weight \(16×512×1×1 for 9×512×1×1\)",
    ),
    "depth": (
        lambda w: {k: v for k, v in w.items() if not k.startswith("features.40.")},
        "12 convolutions in a row, unlike vgg11, vgg13, vgg16, vgg19",
    ),
    "foreign": (lambda w: {"stem.weight": torch.zeros(1)}, r"its first tensor is stem\.weight"),
    "empty": (lambda w: {"state_dict": {}}, "holds no tensors"),
    "a number": (lambda w: {"state_dict": {"fc.weight": 3}}, r"holds a int as 'fc\.weight'"),
    "a list": (lambda w: [torch.zeros(1)], "holds a list"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(save: Save, vgg: Weights, fault: str) -> None:
    change, message = REFUSED[fault]
    path = save(change(vgg))
    with pytest.raises(CheckpointError, match=message) as caught:
        convert_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_resnet_is_sent_to_create_model(save: Save, resnet50: Weights) -> None:
    plain = {name: t for name, t in resnet50.items() if not name.startswith("layer_reduce")}
    plain["fc.weight"] = torch.zeros(6, 2048)
    with pytest.raises(CheckpointError, match=r"takes 2048 values.*checkpoint_path"):
        convert_checkpoint(save(plain))


def test_resnet_of_another_depth(save: Save, resnet50: Weights) -> None:
    fewer = {name: t for name, t in resnet50.items() if not name.startswith("layer3.5.")}
    with pytest.raises(
        CheckpointError, match=r"\(3, 4, 5, 3\) blocks .* unlike resnet50, resnet101, resnet152"
    ):
        convert_checkpoint(save(fewer))


def test_numbers_of_numpy_are_refused_with_advice(save: Save, vgg: Weights) -> None:
    # The authors' code writes the learning rate of its logarithmic schedule like this.
    checkpoint = training_checkpoint(vgg, "mpncovvgg16_bn")
    checkpoint["optimizer"]["param_groups"][0]["lr"] = np.float64(0.1)
    with pytest.raises(CheckpointError, match=r"numpy.*weights_only=False.*state_dict alone"):
        convert_checkpoint(save(checkpoint))
