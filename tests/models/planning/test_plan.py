"""A plan predicts the cost of a model and of a training step without building the model."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from covpool.functional.newton_schulz import FITTED_STEPS
from covpool.models import ModelConfig, PooledClassifier, build_model
from covpool.models.footprint import MISCOUNTED, STATES, Footprint, measure, state_of
from covpool.models.plan import COLUMNS, HeadChoice, Plan, advice, head_choices, plan, plan_text, recommend

BATCH = 2
RESNET = ModelConfig("test_resnet", num_classes=11, dim=24, image_size=64)
VIT = ModelConfig("test_vit", num_classes=11, dim=24)  # timm's smallest
CONFIGS = {
    "resnet18": ModelConfig("resnet18", num_classes=11, dim=24, image_size=64),
    "vit": VIT,
    "unreduced": dataclasses.replace(VIT, dim=None),
    "low rank": dataclasses.replace(RESNET, rank=5),
    "hidden layers": dataclasses.replace(RESNET, head="mlp", hidden=(9, 7), hidden_batchnorm=True),
    "dropout": dataclasses.replace(RESNET, drop_rate=0.5),
    "joined average": dataclasses.replace(RESNET, join="gap"),
    "joined class token": dataclasses.replace(VIT, join="cls"),
    "first order": dataclasses.replace(RESNET, pool="gap", dim=None),
    "no classifier": dataclasses.replace(RESNET, num_classes=0),
}


# A plan takes seconds, so most configurations are left to the slow tests.
FAST = ("resnet18", "vit", "low rank")
every_config = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CONFIGS]
)


@cache
def planned(name: str, precision: Any = "float32") -> Plan:
    return plan(CONFIGS[name], batch_size=BATCH, precision=precision)


@cache
def built(name: str) -> PooledClassifier:
    return build_model(CONFIGS[name])


@pytest.fixture(scope="module")
def resnet() -> Plan:
    return plan(ModelConfig("resnet18"))


def parameters(*modules: nn.Module | None) -> int:
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def flops(costs: Footprint) -> int:
    return costs.forward_flops + costs.backward_flops


def step(model: PooledClassifier, precision: torch.dtype) -> None:
    """Run one training step, as a user would write it."""
    images = torch.randn(BATCH, *model.pretrained_cfg["input_size"])
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        outputs = model.train()(images)
        if model.num_classes:
            loss = F.cross_entropy(outputs, torch.arange(BATCH))
        else:
            loss = outputs.sum()
    loss.backward()


def bytes_kept(model: PooledClassifier, precision: torch.dtype) -> int:
    """Return the bytes that autograd saves in a real forward pass, without parameters."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model, precision)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class Uncounted(TorchDispatchMode):
    """Count the FLOPs that torch's counter omits: in-place products, and attention on a CPU."""

    products = attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.baddbmm_.default:
            self.products += 2 * args[1].numel() * args[2].shape[-1]
        elif func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.attention += 2 * self._product(args[0])
        elif func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.attention += 5 * self._product(args[1])  # the recomputed scores, and four gradients
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _product(query: Tensor) -> int:
        return 2 * query.numel() * query.shape[-2]


@every_config
def test_parameters_are_those_of_the_model(name: str) -> None:
    costs, model = planned(name), built(name)
    assert costs.backbone.parameters == parameters(model.backbone)
    assert costs.pooling.parameters == parameters(model.pool)
    assert costs.head.parameters == parameters(model.head, model.first_order)
    assert costs.total.parameters == parameters(model)
    assert costs.config == model.config
    assert costs.vector == model.pool.out_features


@pytest.mark.slow
def test_parameters_of_the_papers_resnet50() -> None:
    resnet50 = plan(ModelConfig("resnet50"))
    assert resnet50.total.parameters == 56_929_832
    assert resnet50.head.parameters == 32_896 * 1000 + 1000
    assert resnet50.pooling.parameters == 2048 * 256 + 2 * 256


@pytest.mark.parametrize(
    "name", ["resnet18", "vit", "low rank", pytest.param("first order", marks=pytest.mark.slow)]
)
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    costs, model = planned(name), built(name)
    with FlopCounterMode(display=False) as counter, Uncounted() as uncounted:
        step(model, torch.float32)
    # torch assigns FLOPs to modules with its own hooks.
    counted = {module: sum(flops.values()) for module, flops in counter.get_flop_counts().items()}
    assert flops(costs.head) == counted["PooledClassifier.head"]
    assert flops(costs.pooling) == counted.get("PooledClassifier.pool", 0) + uncounted.products
    assert flops(costs.total) == counted["Global"] + uncounted.products + uncounted.attention
    assert (uncounted.attention > 0) == (name == "vit")


def test_flops_of_a_transformer_by_hand() -> None:
    found = planned("vit")
    tokens, width, blocks, patch = 101, 64, 6, 3 * 16 * 16
    linear = blocks * 10 * tokens * width**2 + (tokens - 1) * patch * width
    assert found.backbone.forward_flops == 2 * 2 * (linear + blocks * 2 * tokens**2 * width)


def test_flops_of_the_head_by_hand(resnet: Plan) -> None:
    batch, d, classes = 256, 256, 1000
    assert resnet.head.forward_flops == 2 * batch * (d * (d + 1) // 2) * classes
    assert resnet.head.backward_flops == 2 * resnet.head.forward_flops


def test_flops_of_the_pooling_by_hand(resnet: Plan) -> None:
    batch, channels, d, n = 256, 512, 256, 14 * 14
    reduction = 2 * channels * d * n
    # On the positions side: 3K - 3 n×n products forward and 4K - 4 backward, plus 3 and 4 with the features.
    forward, backward = 3 * FITTED_STEPS - 3, 4 * FITTED_STEPS - 4
    square, thin, wide = 2 * n**3, 2 * n * n * d, 2 * n * d * d
    assert resnet.pooling.forward_flops == batch * (reduction + forward * square + 2 * thin + wide)
    assert resnet.pooling.backward_flops == batch * (2 * reduction + backward * square + 3 * thin + wide)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 4])
def test_flops_of_convolutions(kind: type[nn.Module], groups: int) -> None:
    layer = kind(8, 12, 3, stride=2, groups=groups)
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=MISCOUNTED) as ours:
        result = layer(x)
        forward = ours.get_total_flops()
        result.sum().backward()
    assert ours.get_total_flops() == 3 * forward
    if groups == 1:
        with FlopCounterMode(display=False) as torchs:
            layer(x).sum().backward()
        assert ours.get_total_flops() == torchs.get_total_flops()


def test_the_gradient_of_the_images_is_not_computed() -> None:
    costs = planned("resnet18").backbone
    first_layer = 2 * BATCH * 64 * 32 * 32 * 3 * 7 * 7
    assert costs.backward_flops == 2 * costs.forward_flops - first_layer


@every_config
def test_bytes_kept_are_those_of_a_real_step(name: str) -> None:
    assert planned(name).total.copy_bytes == 0
    assert planned(name).total.activation_bytes == bytes_kept(built(name), torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "low rank",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet18", "vit", "joined class token")),
    ],
)
def test_bytes_kept_are_those_of_a_real_step_under_autocast(name: str) -> None:
    costs, model = planned(name, "bfloat16").total, built(name)
    real = bytes_kept(model, torch.bfloat16)
    # BatchNorm saves mean and deviation in float32; torch's fake tensors have them in bfloat16.
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert costs.copy_bytes + costs.activation_bytes == real - sum(2 * 2 * n.num_features for n in norms)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        *(pytest.param(f"joined {name}", marks=pytest.mark.slow) for name in ("average", "class token")),
    ],
)
def test_every_part_is_measured_as_on_real_tensors(name: str) -> None:
    costs, real = planned(name), measure(built(name), BATCH, "float32")
    parts = {"backbone": costs.backbone, "pooling": costs.pooling, "head": costs.head}
    assert {part: costs.activation_bytes for part, costs in parts.items()} == real.activations
    assert {part: costs.forward_flops for part, costs in parts.items()} == real.forward
    assert {part: costs.backward_flops for part, costs in parts.items()} == real.backward


def test_copies_are_those_of_the_weights_that_meet_a_product() -> None:
    costs, model = planned("low rank", "bfloat16"), built("low rank")
    assert costs.total.copy_bytes == 2 * sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert costs.head.copy_bytes == 2 * (5 * 300 + 11 * 5)


def test_activations_grow_with_the_batch_and_copies_do_not() -> None:
    one = planned("low rank", "bfloat16").total
    three = plan(CONFIGS["low rank"], batch_size=3 * BATCH, precision="bfloat16").total
    # The BatchNorm statistics do not grow.
    assert three.activation_bytes == pytest.approx(3 * one.activation_bytes, rel=0.01)
    assert three.copy_bytes == one.copy_bytes
    assert three.forward_flops == 3 * one.forward_flops


@pytest.mark.parametrize("optimizer", STATES)
def test_optimiser_state_is_that_of_a_real_optimiser(optimizer: Any) -> None:
    layer = nn.Linear(5, 3)
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    real = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](
        layer.parameters(), lr=0.1, **options
    )
    layer(torch.ones(1, 5)).sum().backward()
    real.step()
    kept = [t for state in real.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
    costs = state_of([layer], optimizer)
    assert costs["optimizer_bytes"] == sum(t.nbytes for t in kept)
    assert costs["gradient_bytes"] == sum(p.grad.nbytes for p in layer.parameters() if p.grad is not None)


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    layer = nn.Linear(5, 3).requires_grad_(False)
    costs = state_of([layer], "adamw")
    assert costs == {"parameters": 18, "parameter_bytes": 72, "gradient_bytes": 0, "optimizer_bytes": 0}


def test_total_is_the_sum_and_what_must_fit_is_all_of_it(resnet: Plan) -> None:
    for field in dataclasses.fields(resnet.total):
        parts = (resnet.backbone, resnet.pooling, resnet.head)
        assert getattr(resnet.total, field.name) == sum(getattr(part, field.name) for part in parts)
    total = resnet.total
    state = total.parameter_bytes + total.gradient_bytes + total.optimizer_bytes
    assert total.training_bytes == state + total.copy_bytes + total.activation_bytes


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (0, None),
        (1, "linear"),
        (10_000, "linear"),
        (10_001, "low rank or narrow"),
        (100_000, "low rank or narrow"),
        (100_001, "class-divided"),
        (10**9, "class-divided"),
    ],
)
def test_recommendation(classes: int, expected: str | None) -> None:
    assert recommend(classes) == expected


def test_ten_million_classes_take_seconds_and_no_memory() -> None:
    classes, vector = 10_000_000, 300
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    costs = plan(dataclasses.replace(RESNET, num_classes=classes), batch_size=256)
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
    assert costs.head.parameters == classes * (vector + 1)
    assert costs.head.activation_bytes >= 4 * 256 * classes
    assert costs.recommendation == "class-divided"
    text = plan_text(costs)
    assert "--loop.divide-classes true of covpool train" in text.replace("\n", " ")
    assert max(map(len, text.splitlines())) <= COLUMNS


def choices(config: ModelConfig) -> tuple[HeadChoice, ...]:
    with torch.device("meta"):
        return head_choices(build_model(config), "sgd")


def test_heads_for_ten_million_classes() -> None:
    classes, vector, narrow = 10_000_000, 256 * 257 // 2, 128 * 129 // 2
    heads = choices(dataclasses.replace(RESNET, num_classes=classes, dim=256))
    assert {head.name: head.parameters for head in heads} == {
        "linear": classes * (vector + 1),
        "rank 512": 512 * vector + 513 * classes,
        "dim 128": classes * (narrow + 1),
        "linear, 1 of 8 parts": classes // 8 * (vector + 1),
        "linear, 1 of 64 parts": classes // 64 * (vector + 1),
    }
    assert not any(head.sent_bytes for head in heads)
    assert all(head.parameter_bytes == 4 * head.parameters for head in heads)
    assert all(head.state_bytes == 12 * head.parameters for head in heads)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_classes": 1000, "dim": 256}, ["linear", "rank 512", "dim 128"]),
        ({"num_classes": 1000, "dim": 128}, ["dim 128", "rank 512"]),
        ({"num_classes": 1000, "dim": 256, "rank": 64}, ["rank 64", "linear", "rank 512", "dim 128"]),
        ({"num_classes": 1000, "dim": 256, "rank": 512}, ["rank 512", "linear", "dim 128"]),
        ({"num_classes": 10, "dim": 256}, ["linear", "dim 128"]),  # a rank of 512 would be larger than linear
        ({"num_classes": 10, "dim": 64}, ["linear"]),
        ({"num_classes": 10, "head": "mlp", "hidden": (8,), "dim": 64}, ["hidden 8", "linear"]),
        ({"num_classes": 100, "pool": "gap", "dim": None}, ["linear"]),
        ({"num_classes": 0}, []),
    ],
)
def test_alternatives_are_the_ones_that_save(changes: dict[str, Any], names: list[str]) -> None:
    assert [head.name for head in choices(dataclasses.replace(RESNET, **changes))] == names


@pytest.mark.parametrize(("classes", "is_divided"), [(3, False), (60, False), (63, False), (70, True)])
def test_parts_are_recommended_where_they_send_less(classes: int, is_divided: bool) -> None:
    # 4 processes with 16 images each: the number of images is close to the number of classes.
    config = dataclasses.replace(RESNET, num_classes=classes, dim=256)
    costs = plan(config, batch_size=16, precision="float32", processes=4)
    assert (costs.recommendation == "class-divided") is is_divided
    linear, *others = costs.heads
    assert linear.sent_bytes == 2 * 3 / 4 * 4 * linear.parameters
    assert (others[-1].name == "linear, 1 of 4 parts") is (classes > 3)
    if is_divided:
        assert others[-1].sent_bytes < linear.sent_bytes
        assert "each GPU sends" in advice(costs)
        assert "sent per step" in plan_text(costs)
        assert max(map(len, plan_text(costs).splitlines())) <= COLUMNS


def test_a_part_of_a_low_rank_head_has_the_whole_bottleneck() -> None:
    heads = choices(dataclasses.replace(RESNET, num_classes=200_000, rank=16))
    (part,) = (head for head in heads if head.name == "rank 16, 1 of 64 parts")
    assert part.parameters == 16 * 300 + 17 * 3125


def test_text_of_a_plan(resnet: Plan) -> None:
    text = plan_text(resnet)
    lines = text.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0] == "resnet18, isqrt_cov of 256 channels (32,896 values), 1,000 classes"
    assert lines[1] == "training on images 3×224×224, batch 256, bfloat16, sgd"
    assert lines[4].split() == ["parameters", "11.2", "M", "132", "k", "32.9", "M", "44.2", "M"]
    assert lines[-1] == "Recommended up to 10,000 classes: a linear head (one layer, full rank)."
    for word in (
        "bfloat16 copies",
        "activations",
        "must fit",
        "GFLOPs",
        *(head.name for head in resnet.heads),
    ):
        assert word in text


def test_text_has_no_row_without_a_meaning() -> None:
    assert "copies" not in plan_text(planned("low rank"))
    without = plan_text(planned("no classifier"))
    assert without.endswith("No classifier: the output is the vector of 300 values.")
    assert "linear" not in without


def test_advice_leaves_out_what_cannot_be(resnet: Plan) -> None:
    many = dataclasses.replace(resnet, recommendation=recommend(20_000))
    assert advice(many).endswith("a low-rank head, rank=512, or a narrower covariance, dim=128.")
    first_order = dataclasses.replace(many, heads=resnet.heads[:2])
    assert advice(first_order).endswith("a low-rank head, rank=512.")


def test_a_plan_goes_into_json(resnet: Plan) -> None:
    values = json.loads(json.dumps(dataclasses.asdict(resnet)))
    assert values["total"]["training_bytes"] == resnet.total.training_bytes
    assert values["config"]["backbone"] == "resnet18"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "^batch_size must be at least 1; got 0"),
        ({"precision": "int8"}, "^precision must be one of 'float32', 'bfloat16', 'float16'; got 'int8'"),
        ({"optimizer": "lion"}, "^optimizer must be one of 'sgd', 'adamw'; got 'lion'"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(RESNET, **arguments)


def test_a_step_that_fails_is_told_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^vgg11 fails on 256 images 3×8×8: .* Output size is too small"):
        plan(ModelConfig("vgg11", num_classes=11, image_size=8))
    assert capfd.readouterr() == ("", "")  # torch would log a traceback


@pytest.mark.slow
@pytest.mark.parametrize(
    "backbone", ["convnext_atto", "efficientnet_b0", "swin_tiny_patch4_window7_224", "vgg11_bn"]
)
def test_other_families(backbone: str) -> None:
    config = ModelConfig(backbone, num_classes=11, dim=24)
    costs, real = (
        plan(config, batch_size=BATCH, precision="float32"),
        measure(build_model(config), BATCH, "float32"),
    )
    assert costs.total.activation_bytes == sum(real.activations.values())
    assert costs.total.forward_flops == sum(real.forward.values())
    assert 1.8 < costs.total.backward_flops / costs.total.forward_flops < 2.1
