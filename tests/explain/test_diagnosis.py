from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from covpool import create_model, save_model
from covpool.cli.main import main
from covpool.explain.diagnosis import Diagnosis, diagnose, medians, summed_up, warnings
from covpool.functional import covariance
from covpool.functional.newton_schulz import fitted_steps, newton_schulz
from covpool.models.model import PooledClassifier


def made(**options: Any) -> PooledClassifier:
    torch.manual_seed(0)
    return create_model("test_resnet", **{"dim": 16, "num_classes": 5, **options}).eval()


def images(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(count, 3, 160, 160))


def received(model: PooledClassifier, image: Tensor) -> Tensor:
    with torch.no_grad():
        x: Tensor = model.pool.reduction(model.forward_features(image[None]))
    return x[0].flatten(1)


def test_numbers_by_hand() -> None:
    model, (image,) = made(pool_options={"iteration": "paper"}), images(1)
    found = diagnose(model, [image])
    a = covariance(received(model, image).double())
    values = torch.linalg.eigvalsh(a).flip(0)
    assert (found.images, found.channels, found.positions, found.method) == (1, 16, 100, "isqrt_cov")
    assert found.spectrum == pytest.approx((values / values.sum()).tolist(), rel=1e-4)
    assert found.effective_rank == pytest.approx(summed_up(values)["effective_rank"], rel=1e-4)
    # One channel of this network is constant, so one eigenvalue is zero.
    lively = values[values > 1e-12 * values[0]]
    assert found.condition == pytest.approx(float(lively[0] / lively[-1]), rel=1e-3)
    assert found.rank == len(lively)
    y = (values / values.sum()).diag()
    assert len(found.residuals) == 5
    for step, residual in enumerate(found.residuals, 1):
        root, z = y, torch.eye(16, dtype=y.dtype)
        for _ in range(step):
            t = (3 * torch.eye(16, dtype=y.dtype) - z @ root) / 2
            root, z = root @ t, t @ z
        assert residual == pytest.approx(float((root @ root - y).norm() / y.norm()), rel=1e-3)
    assert list(found.residuals) == sorted(found.residuals, reverse=True)


def test_residuals_of_fitted_steps() -> None:
    model, (image,) = made(pool_options={"steps": 3, "iteration": "fitted"}), images(1)
    values = torch.linalg.eigvalsh(covariance(received(model, image).double())).clamp_min(0)
    a = (values / values.sum()).reshape(-1, 1, 1)
    root, _ = newton_schulz(a, fitted_steps(3))
    residuals = diagnose(model, [image]).residuals
    assert len(residuals) == 3
    assert residuals[-1] == pytest.approx(float((root**2 - a).norm() / a.norm()), rel=1e-3)


def test_the_gradient_is_that_of_the_loss() -> None:
    model, (image,) = made(), images(1)
    x = received(model, image)[None].requires_grad_()
    logits = model.head(model.pool.pooling(x))
    torch.nn.functional.cross_entropy(logits, logits.argmax(1)).backward()
    assert x.grad is not None
    assert diagnose(model, [image]).gradient_rms == pytest.approx(
        float(x.grad.pow(2).mean().sqrt()), rel=1e-3
    )


def test_constant_channels_are_counted() -> None:
    model = made()
    with torch.no_grad():
        norm = next(m for m in model.pool.reduction.modules() if isinstance(m, torch.nn.BatchNorm2d))
        norm.weight[:7] = 0
    found = diagnose(model, images())
    assert found.constant == pytest.approx(7 / 16)
    assert warnings(found) == ["44% of the channels are constant; try dim=8"]


def test_the_root_evens_eigenvalues_out() -> None:
    found = diagnose(made(pool="mpn_cov"), images())
    assert found.condition_after == pytest.approx(found.condition**0.5, rel=0.05)
    assert found.effective_rank_after is not None
    assert found.effective_rank_after > found.effective_rank
    assert found.residuals == ()


def test_a_vector_that_is_no_matrix() -> None:
    found = diagnose(made(pool="cbp"), images(1))
    assert (found.condition_after, found.effective_rank_after, found.spectrum_after) == (None, None, ())


def test_an_average_has_no_covariance() -> None:
    with pytest.raises(ValueError, match="the pooling is gap: diagnosis needs covariance pooling"):
        diagnose(made(pool="gap", dim=None), images(1))


def test_channels_that_are_all_constant() -> None:
    model = made()
    with torch.no_grad():
        next(m for m in model.pool.reduction.modules() if isinstance(m, torch.nn.BatchNorm2d)).weight.zero_()
    found = diagnose(model, images(1))
    assert (found.constant, found.effective_rank) == (1.0, 0.0)
    assert warnings(found)[0] == (
        "100% of the channels are constant: check the preprocessing and the weights"
    )


def test_a_model_without_classifier() -> None:
    with pytest.raises(ValueError, match="no classifier"):
        diagnose(made(num_classes=0), images(1))


def test_no_images() -> None:
    with pytest.raises(ValueError, match="no image is readable"):
        diagnose(made(), [])


@pytest.fixture
def healthy() -> Diagnosis:
    found = diagnose(made(), images(1))
    return dataclasses.replace(
        found, constant=0.0, effective_rank=9.0, residuals=(0.3, 0.1), gradient_rms=1e-3
    )


def test_words(healthy: Diagnosis) -> None:
    assert warnings(healthy) == []
    cases: dict[str, tuple[str, Any]] = {
        "41% of the channels are constant; try dim=128": ("constant", 0.41),
        "1.2 of 256 directions": ("effective_rank", 1.2),
        "after 2 steps the result is far from a square root (residual 0.90); try more steps": (
            "residuals",
            (1.0, 0.9),
        ),
        "the gradient at the pooling is 1e-09": ("gradient_rms", 1e-9),
    }
    wide = dataclasses.replace(healthy, channels=256)
    for sentence, (name, value) in cases.items():
        (message,) = warnings(dataclasses.replace(wide, **{name: value}))
        assert message.startswith(sentence)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_model(create_model("test_resnet", dim=8, num_classes=3), tmp_path / "bundle")
    (tmp_path / "images").mkdir()
    for i in range(3):
        noise = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8).numpy()
        Image.fromarray(noise).save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "images" / "bad.png").write_bytes(b"\x89PNG and no more")
    words = [str(tmp_path / "bundle"), str(tmp_path / "images"), "--out", str(tmp_path / "out")]
    assert main(["diagnose", *words]) == 0
    output = capsys.readouterr().out
    assert "isqrt_cov, 8 channels, 100 positions" in output
    assert "on 3 images" in output
    found = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert found["images"] == 3
    assert len(found["spectrum"]) == 8
    assert (tmp_path / "out" / "diagnosis.png").read_bytes()[:4] == b"\x89PNG"


def test_a_median_counts_zeros() -> None:
    assert medians([{"share": 0.0}, {"share": 4.0}, {"share": 0.0}]) == {"share": 0.0}
    assert medians([{"share": 0.0}, {"share": None}]) == {"share": None}
