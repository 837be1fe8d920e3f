"""Properties of every method: shapes, dtypes, masks, invalid and degenerate input."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from covpool.nn import CovPool
from covpool.nn.pooling import METHODS, Method
from tests.functional.degenerate import KINDS
from tests.functional.tolerances import assert_close
from tests.nn.pooling.oracle import upstream, value_and_gradient

B, C = 3, 6

# Options that run other code, in addition to the defaults of every method, and small sizes for speed.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "abmilp gated": ("abmilp", {"gated": True}),
    "cbp": ("cbp", {"features": 50}),
    "cbp random_maclaurin": ("cbp", {"features": 50, "projection": "random_maclaurin"}),
    "efficient_probing batchnorm": ("efficient_probing", {"batchnorm": True}),
    "efficient_probing of features": ("efficient_probing", {"queries": 2, "value": False}),
    "g2denet newton_schulz": ("g2denet", {"root": "newton_schulz"}),
    "improved_bcnn newton_schulz lyapunov": ("improved_bcnn", {"forward": "newton_schulz"}),
    "improved_bcnn newton_schulz iteration": (
        "improved_bcnn",
        {"forward": "newton_schulz", "backward": "lyapunov_iteration"},
    ),
    "improved_bcnn svd iteration": ("improved_bcnn", {"backward": "lyapunov_iteration"}),
    "moment_probing": ("moment_probing", {"width": 21, "heads": 3}),
    "mpn_cov spectral": ("mpn_cov", {"post_normalization": "spectral"}),
    "mpn_cov frobenius": ("mpn_cov", {"post_normalization": "frobenius", "power": 0.7}),
}
APPROXIMATE = ("mpa_lya", "mtp_lya", "svd_pade", "svd_taylor")
every_method = pytest.mark.parametrize("name", dict.fromkeys([*METHODS, *VARIANTS]))


def make(name: str, channels: int = C) -> Method:
    """Return the method in evaluation mode, without the randomness of training."""
    torch.manual_seed(0)
    method, options = VARIANTS.get(name, (name, {}))
    return METHODS[method](channels, **options).eval()


def layer(name: str, dim: int | None, **more: Any) -> CovPool:
    """Return the complete layer around the method, in training mode."""
    method, options = VARIANTS.get(name, (name, {}))
    return CovPool(C, method, dim=dim, **more, **options)


@every_method
def test_length_of_the_vector(name: str) -> None:
    for channels in (1, 2, C):
        pool = make(name, channels)
        assert pool(torch.randn(B, channels, 7)).shape == (B, pool.out_features)


@every_method
def test_maps_and_tokens_are_the_same_features(name: str) -> None:
    for dim in (None, 4):
        torch.manual_seed(0)
        pool = layer(name, dim, reduction="linear").eval()
        x = torch.randn(B, C, 4, 5)
        expected = pool(x)
        assert expected.shape == (B, pool.out_features), dim
        assert_close(pool(x.flatten(2).mT), expected)


@every_method
def test_half_precision_is_computed_in_float32(name: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(B, C, 9).to(dtype)
        pool = make(name)
        if dtype == torch.float64:
            pool = pool.double()
        y, grad = value_and_gradient(pool, x)
        wide = torch.promote_types(dtype, torch.float32)
        assert y.dtype == wide, dtype
        assert grad.dtype == dtype
        assert_close(y, pool(x.to(wide)).detach())


@every_method
def test_float32_is_near_float64(name: str) -> None:
    """Use fewer positions than channels, and features like those of a backbone."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 64, 49, generator=generator).relu() * torch.rand(64, 1, generator=generator)
    pool = make(name, 64)
    found = value_and_gradient(pool, x)
    expected = value_and_gradient(pool.double(), x.double())
    # Near zero the signed root is so steep that a gradient through it has few correct digits.
    limits = (1e-3, 0.5) if name.startswith("improved_bcnn") else (2e-4, 2e-3)
    for single, double, limit in zip(found, expected, limits, strict=True):
        assert ((single - double).norm() / double.norm()).item() < limit


@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in ("improved_bcnn", "moment_probing")]
)
def test_float32_on_a_spectrum_of_photographs(name: str) -> None:
    """Test a condition number of 3.7e5, as for 320 channels on 14×14 positions: no eigenvalue counts as zero.

    Exact roots have the fewest correct digits here: the derivative at a small eigenvalue is large, and its
    eigenvector is uncertain.
    """
    generator = torch.Generator().manual_seed(6)
    left, _ = torch.linalg.qr(torch.randn(320, 195, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(196, 195, generator=generator, dtype=torch.float64))
    x = ((left * torch.logspace(0, -2.8, 195, dtype=torch.float64)) @ right.mT * 14)[None].float()
    pool = make(name, 320)
    found = value_and_gradient(pool, x)
    expected = value_and_gradient(pool.double(), x.double())
    exact_root = name in ("mpn_cov", "g2denet", "svd_pade", "svd_taylor", "power_tmlr")
    for single, double, limit in zip(found, expected, (1e-3, 0.2 if exact_root else 5e-3), strict=True):
        assert ((single - double).norm() / double.norm()).item() < limit


@every_method
def test_autocast_has_no_say(name: str) -> None:
    pool, x = make(name), torch.randn(B, C, 9)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = pool(leaf)
    assert y.dtype == torch.float32
    expected, expected_grad = value_and_gradient(pool, x)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y, leaf, upstream(y))[0], expected_grad)


@every_method
def test_the_layer_in_bfloat16(name: str) -> None:
    pool = layer(name, 4).to(torch.bfloat16)
    y = pool(torch.randn(B, C, 3, 5).bfloat16())
    (y * upstream(y)).sum().backward()
    assert y.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pool.parameters())


@every_method
def test_equal_weights_are_no_weights(name: str) -> None:
    pool, x = make(name).double(), torch.randn(B, C, 9, dtype=torch.float64)
    for weights in (torch.full((B, 9), 0.3, dtype=torch.float64), torch.ones(B, 9, dtype=torch.bool)):
        for one, other in zip(value_and_gradient(pool, x, weights), value_and_gradient(pool, x), strict=True):
            assert_close(one, other, relative=1e-9)


@every_method
def test_whole_weights_are_positions_repeated(name: str) -> None:
    pool, x = make(name).double(), torch.randn(B, C, 8, dtype=torch.float64)
    times = torch.tensor([1, 2, 3, 1, 1, 2, 1, 1])
    weighted = pool(x, times.double().expand(B, -1))
    assert_close(weighted, pool(x.repeat_interleave(times, dim=2)), relative=1e-9)


@every_method
def test_masked_positions_may_hold_anything(name: str) -> None:
    pool, x = make(name), torch.randn(2, C, 9)
    kept = torch.ones(2, 9).bool()
    kept[0, 7:], kept[1, ::4] = False, False
    alone = [value_and_gradient(lambda leaf, _: pool(leaf), x[i : i + 1, :, kept[i]]) for i in range(2)]
    for hidden, dtype in itertools.product((torch.nan, torch.inf, 1e38), (torch.bool, torch.float32)):
        dirty = x.masked_fill(~kept.unsqueeze(1), hidden)
        y, grad = value_and_gradient(pool, dirty, kept.to(dtype))
        for i, (y_alone, grad_alone) in enumerate(alone):
            assert y[i].isfinite().all(), f"{hidden} under a mask of {dtype}"
            assert_close(y[i : i + 1], y_alone, relative=1e-4)
            assert grad[i, :, ~kept[i]].eq(0).all(), f"{hidden} under a mask of {dtype}"
            assert_close(grad[i : i + 1, :, kept[i]], grad_alone, relative=1e-2)


@pytest.mark.parametrize(
    "name", dict.fromkeys(name for name in [*METHODS, *VARIANTS] if name not in APPROXIMATE)
)
def test_gradient_of_the_weights(name: str) -> None:
    """Compare with finite differences, and with a one-sided difference at a weight of zero."""
    pool, x = make(name).double(), torch.randn(2, C, 9, dtype=torch.float64)
    weights = torch.rand(2, 9, dtype=torch.float64) + 0.1
    if "newton_schulz" not in name:  # after few steps its gradient is approximate too
        assert torch.autograd.gradcheck(lambda w: pool(x, w), weights.clone().requires_grad_())
    if name in ("cholesky", "gem", "simpool"):  # documented: no reliable gradient at zero
        return
    weights[:, 3] = 0.0
    step = torch.zeros_like(weights)
    step[:, 3] = 1e-7
    expected = ((pool(x, weights + step) - pool(x, weights)).sum(-1) / 1e-7).detach()
    pool(x, weights.requires_grad_()).sum().backward()
    assert_close(weights.grad[:, 3], expected, relative=1e-2)


@every_method
def test_everything_masked_is_finite(name: str) -> None:
    weights = torch.ones(2, 5)
    weights[0] = 0.0
    y, grad = value_and_gradient(make(name), torch.randn(2, C, 5), weights)
    assert y.isfinite().all()
    assert grad.isfinite().all()
    assert grad[0].eq(0).all()


@every_method
def test_degenerate_features(name: str) -> None:
    """Test degenerate features of all scales, with more positions than channels, fewer, and one.

    All kinds and scales are in one batch, because one batch per case would take fifty times as long.
    """
    pool = make(name)
    cases = [(kind, exponent) for kind in KINDS for exponent in (-12, -6, 0, 6, 12)]
    for positions in (9, 4, 1):
        images = [
            kind(2, C, positions, torch.Generator().manual_seed(3)) * 10.0**exponent
            for kind, exponent in cases
        ]
        x = torch.cat(images).float()
        mask = torch.ones(len(x), positions).bool()
        mask[::2, 1::2] = False
        for weights in (None, mask):
            y, grad = value_and_gradient(pool, x, weights)
            finite = y.isfinite().all(1) & grad.flatten(1).isfinite().all(1)
            bad = [f"{kind.__name__} * 1e{exponent}" for kind, exponent in cases]
            bad = [case for case, ok in zip(bad, finite.view(-1, 2).all(1).tolist(), strict=True) if not ok]
            assert not bad, f"{positions} positions, {'no mask' if weights is None else 'masked'}: {bad}"


@every_method
def test_a_broken_image_breaks_no_other(name: str) -> None:
    pool, x = make(name), torch.randn(3, C, 9)
    for poison in (torch.nan, torch.inf):
        broken = x.clone()
        broken[1, 2, 3] = poison
        for clean, dirty in zip(value_and_gradient(pool, x), value_and_gradient(pool, broken), strict=True):
            assert_close(dirty[::2], clean[::2])
        assert not pool(broken)[1].isfinite().all(), f"an image with {poison} must not look like a sound one"


@every_method
def test_no_images(name: str) -> None:
    y, grad = value_and_gradient(make(name), torch.zeros(0, C, 5))
    assert y.shape == (0, make(name).out_features)
    assert grad.shape == (0, C, 5)


@every_method
def test_shapes_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        pool = layer(name, None)
        assert pool(torch.empty(2, C, 3, 3)).shape == (2, pool.out_features)


@every_method
def test_copies_and_files(name: str) -> None:
    pool, x = layer(name, 4), torch.randn(B, C, 3, 5)
    pool(x)
    file = io.BytesIO()
    torch.save(pool.state_dict(), file)
    file.seek(0)
    torch.manual_seed(7)
    other = layer(name, 4)
    other.load_state_dict(torch.load(file, weights_only=True))
    expected = pool.eval()(x)
    assert torch.equal(other.eval()(x), expected)
    assert torch.equal(copy.deepcopy(pool)(x), expected)


@every_method
def test_reset_parameters_reaches_every_parameter(name: str) -> None:
    pool = make(name)
    for parameter in pool.parameters():
        nn.init.constant_(parameter, 77.0)
    pool.reset_parameters()
    assert all((parameter != 77.0).any() for parameter in pool.parameters())


@every_method
def test_every_parameter_learns(name: str) -> None:
    """DistributedDataParallel waits for the gradient of every parameter."""
    torch.manual_seed(0)
    pool = layer(name, 4)
    y = pool(torch.randn(B, C, 3, 5))
    (y * upstream(y)).sum().backward()
    assert all(p.grad is not None for p in pool.parameters())


@every_method
def test_repr_tells_every_option(name: str) -> None:
    text = repr(layer(name, None))
    for option in make(name).option_names():
        assert f"{option}=" in text
    assert f"out_features={make(name).out_features}" in text


@pytest.mark.parametrize("name", [name for name in METHODS if name != "gap"])
def test_the_documentation_says_what_must_be_known(name: str) -> None:
    """It states the paper, the cost, and for second order the treatment of zero eigenvalues."""
    text = " ".join((METHODS[name].__doc__ or "").split())
    assert "cost" in text.lower()
    assert METHODS[name].order == 1 or "eigenvalues" in text
    assert name == "cov" or any(str(year) in text for year in range(2015, 2027))


@every_method
def test_a_second_derivative_is_right_or_refused(name: str) -> None:
    x = torch.randn(1, 3, 7, dtype=torch.float64, requires_grad=True)
    pool = make(name, 3).double()
    try:
        assert torch.autograd.gradgradcheck(pool, x)
    except RuntimeError as error:
        if "can be differentiated only once" not in str(error):
            raise


@pytest.mark.parametrize("name", METHODS)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"^stepps is not an option of pool '{name}'; its options are: "):
        CovPool(C, name, dim=None, stepps=3)


# A vector that does not depend on the scale of the features has a gradient that grows as 1/|x|.
STEEP = ("bcnn", "cbp", "correlation", "improved_bcnn", "isice", "moment_probing", "mpn_cov")


def repeated(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield features in float16 and float32, each time with the same random numbers."""
    for features in (x, x.float()):
        torch.manual_seed(1)
        yield features


@every_method
def test_float16_gradients_are_infinite_only_beyond_the_range_of_float16(name: str) -> None:
    """They are those of float32, converted. A saturated value would hide the overflow from a GradScaler."""
    pool, generator = make(name, 8).train(name == "dropcov"), torch.Generator().manual_seed(0)
    whole = torch.randint(1, 6, (2, 8, 9), generator=generator)
    for size in (6e-8, 1e-3, 1.0, 65504.0 / 5):
        x = (whole * size).half()
        half, single = (value_and_gradient(pool, features)[1] for features in repeated(x))
        assert single.isfinite().all()
        assert torch.equal(half, single.half())
        if not half.isfinite().all():
            method = VARIANTS.get(name, (name,))[0]
            smallest = size <= (1e-3 if method == "isice" else 6e-8)
            assert (method in STEEP and smallest) or (method == "dropcov" and size > 1e4), size
