"""The layer as a module: options, errors, precision, copies and files."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from covpool.functional import isqrt_cov, triu_vec
from covpool.functional.newton_schulz import FITTED_STEPS, fitted_steps, paper_steps
from covpool.nn import CovPool, methods
from covpool.nn.pooling import METHODS
from tests.functional.tolerances import assert_close

B, C, D = 4, 12, 5


def test_every_method_has_a_line() -> None:
    assert methods().keys() == METHODS.keys()
    assert all(line and "\n" not in line and len(line) <= 100 for line in methods().values())


def test_the_answer_of_methods_is_not_the_table() -> None:
    methods().clear()
    assert "isqrt_cov" in methods()


def test_the_methods_options_are_those_of_the_design() -> None:
    assert METHODS["isqrt_cov"].option_names() == (
        "iteration",
        "steps",
        "normalization",
        "compensation",
        "side",
        "backward",
        "compute_dtype",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 4},
        {"iteration": "paper", "steps": 1},
        {"normalization": "frobenius"},
        {"compensation": "none"},
        {"compute_dtype": torch.bfloat16},
        {"compute_dtype": torch.float16},
        {"side": "positions", "steps": 4},
        {"backward": "recompute"},
    ],
    ids=str,
)
def test_options_reach_the_function(options: dict[str, object]) -> None:
    x = torch.randn(B, C, 3, 5)
    expected = triu_vec(isqrt_cov(x.flatten(2), **options))
    assert torch.equal(CovPool(C, dim=None, **options)(x), expected)


@pytest.mark.parametrize(
    ("options", "iteration", "steps"),
    [
        ({}, "fitted", FITTED_STEPS),
        ({"iteration": "fitted"}, "fitted", FITTED_STEPS),
        ({"iteration": "fitted", "steps": 4}, "fitted", 4),
        ({"iteration": "paper"}, "paper", 5),
        ({"iteration": "paper", "steps": 7}, "paper", 7),
        ({"steps": 3}, "fitted", 3),
        ({"steps": 4}, "fitted", 4),
    ],
    ids=str,
)
def test_choice_of_the_iteration(options: dict[str, object], iteration: str, steps: int) -> None:
    """The fitted iteration is the default. The layer's options always name the iteration."""
    pool, x = CovPool(C, dim=None, **options), torch.randn(B, C, 3, 5)
    assert (pool.pooling.options.iteration, pool.pooling.options.steps) == (iteration, steps)
    coefficients = fitted_steps(steps) if iteration == "fitted" else paper_steps(steps)
    assert pool.pooling.options.coefficients == coefficients
    assert torch.equal(pool(x), triu_vec(isqrt_cov(x.flatten(2), iteration=iteration, steps=steps)))
    assert f"steps={steps}, " in repr(pool)
    assert f"iteration={iteration!r}" in repr(pool)


@pytest.mark.parametrize("steps", [3, 4])
def test_fitted_iteration(steps: int) -> None:
    """It uses its own coefficients, and the result is close to the paper's five steps."""
    x = torch.randn(B, C, 3, 5)
    fitted = CovPool(C, dim=None, iteration="fitted", steps=steps)(x)
    assert torch.equal(fitted, triu_vec(isqrt_cov(x.flatten(2), steps=steps)))
    five = CovPool(C, dim=None, iteration="paper")(x)
    assert (fitted - five).norm() < 0.022 * five.norm()
    assert not torch.equal(fitted, five)


def test_recompute_keeps_less() -> None:
    def kept(backward: str) -> int:
        sizes: list[int] = []
        pool, x = CovPool(C, dim=None, backward=backward), torch.randn(B, C, 3, 5, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: (sizes.append(saved.numel()), saved)[1], lambda saved: saved
        ):
            pool(x)
        return sum(sizes)

    assert kept("recompute") < 0.5 * kept("saved")


@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
def test_batchnorm_takes_the_place_of_the_compensation(normalization: str) -> None:
    pool = CovPool(C, dim=None, compensation="batchnorm", normalization=normalization)
    x = torch.randn(B, C, 3, 5)
    plain = triu_vec(isqrt_cov(x.flatten(2), compensation="none", normalization=normalization))
    norm = nn.BatchNorm1d(pool.out_features)
    assert_close(pool(x), norm(plain))
    assert_close(pool.eval()(x), norm.eval()(plain))
    assert sum(p.numel() for p in pool.parameters()) == 2 * C * (C + 1) // 2


def test_the_three_compensations_differ() -> None:
    x = torch.randn(B, C, 3, 5)
    results = [CovPool(C, dim=None, compensation=c)(x) for c in ("matched", "none", "batchnorm")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(results[one], results[other], atol=0.1)
    # Only the paper's compensation keeps the scale of the features.
    assert_close(CovPool(C, dim=None)(3 * x), 3 * results[0])
    assert_close(CovPool(C, dim=None, compensation="none")(3 * x), results[1])


def test_gradients_reach_batchnorm_in_place_of_compensation() -> None:
    pool = CovPool(C, dim=D, compensation="batchnorm")
    y = pool(torch.randn(B, C, 3, 5))
    (y * torch.randn_like(y)).sum().backward()
    assert len(list(pool.parameters())) == 5
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in pool.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"pool": "isqrtcov"}, ValueError, "got 'isqrtcov': did you mean 'isqrt_cov'"),
        ({"pool": "iSQRT-COV"}, ValueError, "got 'iSQRT-COV': did you mean 'isqrt_cov'"),
        ({"pool": "G2DeNet"}, ValueError, "did you mean 'g2denet'"),
        ({"step": 5}, TypeError, "compute_dtype: did you mean 'steps'"),
        ({"layout": "nchw"}, ValueError, "^layout must be one of 'auto', 'channels_first', 'channels_last'"),
        ({"reduction": "conv"}, ValueError, "^reduction must be one of 'auto', 'convolution', 'linear'"),
        (
            {"iterations": 5},
            TypeError,
            "^iterations is not an option of pool 'isqrt_cov'; its options are: iteration, steps, "
            "normalization, compensation, side, backward, compute_dtype: did you mean 'iteration'",
        ),
        ({"steps": 0}, ValueError, "^steps must be at least 1"),
        ({"steps": 2.5}, TypeError, "^steps must be an int"),
        ({"normalization": "spectral"}, ValueError, "^normalization must be one of 'trace', 'frobenius'"),
        (
            {"compensation": "bn"},
            ValueError,
            "^compensation must be one of 'matched', 'none', 'batchnorm'; got 'bn'",
        ),
        ({"side": "left"}, ValueError, "^side must be one of 'auto', 'channels', 'positions'"),
        ({"backward": "lean"}, ValueError, "^backward must be one of 'saved', 'recompute'"),
        ({"compute_dtype": torch.float64}, ValueError, "^compute_dtype must be one of None, torch.bfloat16"),
        ({"iteration": "fit"}, ValueError, "^iteration must be one of 'fitted', 'paper'"),
        (
            {"steps": 5},
            ValueError,
            '^steps must be 3 or 4 for iteration="fitted"; got 5: pass iteration="paper"',
        ),
        ({"dim": 0}, ValueError, "^dim must be at least 1"),
        ({"dim": "256"}, TypeError, "^dim must be an int, or None for no reduction; got str"),
        ({"in_channels": 0}, ValueError, "^in_channels must be at least 1"),
        ({"in_channels": True}, TypeError, "^in_channels must be an int; got bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_with_the_fix(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CovPool(**{"in_channels": C, **arguments})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_input_gives_float32(dtype: torch.dtype) -> None:
    x = torch.randn(B, C, 3, 5).to(dtype)
    y = CovPool(C, dim=None)(x)
    assert y.dtype == torch.float32
    assert_close(y, CovPool(C, dim=None)(x.float()))


def test_float64_stays_float64() -> None:
    assert CovPool(C, dim=D).double()(torch.randn(B, C, 3, 5).double()).dtype == torch.float64


@pytest.mark.parametrize("compensation", ["matched", "batchnorm"])
@pytest.mark.parametrize("shape", [(B, C, 3, 5), (B, 15, C)], ids=["map", "tokens"])
@pytest.mark.parametrize("mask", [False, True], ids=["whole", "masked"])
def test_autocast_gives_float32_and_finite_gradients(
    shape: tuple[int, ...], compensation: str, mask: bool
) -> None:
    layout = "channels_last" if len(shape) == 3 else "channels_first"
    pool = CovPool(C, dim=D, layout=layout, compensation=compensation)
    x = torch.randn(shape, requires_grad=True)
    weights = torch.rand(B, 15) > 0.3 if mask else None
    with torch.autocast("cpu", torch.bfloat16):
        y = copy.deepcopy(pool)(x, weights)
        y.square().sum().backward()
    assert y.dtype == torch.float32
    assert x.grad.isfinite().all()
    # BatchNorm over four images magnifies the bfloat16 rounding of the reduction.
    relative = 0.02 if compensation == "matched" else 0.3
    assert_close(y, pool(x, weights), relative=relative)


def test_autocast_does_not_reach_the_pooling() -> None:
    pool, x = CovPool(C, dim=None), torch.randn(B, C, 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = pool(x)
    assert torch.equal(y, pool(x))


@pytest.mark.parametrize("compensation", ["matched", "batchnorm"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [False, True], ids=["whole", "masked"])
def test_a_layer_in_bfloat16_gives_float32(compensation: str, training: bool, mask: bool) -> None:
    pool = CovPool(C, dim=D, compensation=compensation).to(torch.bfloat16).train(training)
    weights = torch.rand(B, 15) > 0.3 if mask else None
    y = pool(torch.randn(B, C, 3, 5).bfloat16(), weights)
    y.square().sum().backward()
    assert y.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in pool.parameters())


def test_deepcopy_is_equal_and_apart() -> None:
    pool, x = CovPool(C, dim=D, compensation="batchnorm").eval(), torch.randn(B, C, 3, 5)
    duplicate = copy.deepcopy(pool)
    assert torch.equal(duplicate(x), pool(x))
    nn.init.zeros_(duplicate.reduction.projection.weight)
    assert pool(x).any()


def test_state_dict_goes_through_a_file() -> None:
    pool, x = CovPool(C, dim=D, compensation="batchnorm"), torch.randn(B, C, 3, 5)
    pool(x)  # makes the statistics differ from those of a new layer
    file = io.BytesIO()
    torch.save(pool.state_dict(), file)
    file.seek(0)
    other = CovPool(C, dim=D, compensation="batchnorm")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.eval()(x), pool.eval()(x))


def test_keys_of_the_state_dict() -> None:
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(CovPool(C, dim=D, compensation="batchnorm").state_dict()) == [
        "reduction.projection.weight",
        *(f"reduction.norm.{key}" for key in norm),
        *(f"pooling.norm.{key}" for key in norm),
    ]
    assert list(CovPool(C, dim=D, reduction="linear").state_dict()) == ["reduction.projection.weight"]
    assert list(CovPool(C, dim=None).state_dict()) == []


def test_reset_parameters_starts_again() -> None:
    pool = CovPool(C, dim=D, compensation="batchnorm")
    pool(torch.randn(B, C, 3, 5))
    before = copy.deepcopy(pool.state_dict())
    torch.manual_seed(1)
    pool.reset_parameters()
    torch.manual_seed(1)
    new = CovPool(C, dim=D, compensation="batchnorm")
    new.reset_parameters()
    assert not torch.equal(pool.reduction.projection.weight, before["reduction.projection.weight"])
    for name in ("reduction.norm", "pooling.norm"):
        for key, value in new.get_submodule(name).state_dict().items():
            assert torch.equal(pool.get_submodule(name).state_dict()[key], value)


def test_repr_tells_every_choice() -> None:
    text = repr(CovPool(C, dim=D, layout="channels_last", reduction="linear", steps=3, side="channels"))
    assert "12, pool='isqrt_cov', dim=5, layout='channels_last', out_features=15" in text
    assert "kind='linear'" in text
    assert (
        "iteration='fitted', steps=3, normalization='trace', compensation='matched', side='channels', "
        "backward='saved', compute_dtype=None, out_features=15"
    ) in text


def test_no_global_precision_flag_is_touched() -> None:
    def flags() -> tuple[object, ...]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return (
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            matmul.allow_tf32,
            cudnn.allow_tf32,
            matmul.allow_bf16_reduced_precision_reduction,
            torch.backends.mkldnn.matmul.fp32_precision,
            torch.is_autocast_enabled("cpu"),
        )

    before = flags()
    CovPool(C, dim=D, compute_dtype=torch.bfloat16)(torch.randn(B, C, 3, 5)).sum().backward()
    assert flags() == before
