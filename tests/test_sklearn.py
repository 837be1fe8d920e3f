"""The scikit-learn transformer: scikit-learn's own checks, pipelines, masks, images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from covpool.errors import UsageError
from covpool.nn import CovPool
from covpool.sklearn import CovPoolFeatures

RANDOM = np.random.default_rng(0)


def rows(pool: CovPool, x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    weights = None if mask is None else torch.tensor(mask)
    return np.asarray(pool(torch.tensor(x), weights).detach())


@pytest.mark.parametrize(
    "options", [{}, {"missing": "mask"}, {"pool": "gap"}, {"dim": 1}], ids=["default", "mask", "gap", "dim"]
)
def test_the_checks_of_scikit_learn(options: dict[str, Any]) -> None:
    passed, skipped = [], []
    for estimator, check in estimator_checks_generator(CovPoolFeatures(**options)):
        name = check.func.__name__  # type: ignore[attr-defined]
        try:
            check(estimator)
            passed.append(name)
        except SkipTest as reason:  # an optional package is missing
            skipped.append(f"{name}: {reason}")
    assert len(passed) > 35, skipped
    assert all(re.search("pandas|polars|array_api|SCIPY_ARRAY_API", line) for line in skipped), skipped


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((5, 9, 4), "auto"),
        ((5, 4, 9), "channels_first"),
        ((5, 4, 3, 3), "auto"),
        ((5, 3, 3, 4), "channels_last"),
    ],
)
def test_it_is_the_layer(shape: tuple[int, ...], layout: Any, dtype: Any) -> None:
    x = RANDOM.normal(size=shape).astype(dtype)
    found = CovPoolFeatures(layout=layout, batch_size=2).fit_transform(x)
    assert found.dtype == dtype
    assert found == pytest.approx(rows(CovPool(4, dim=None, layout=layout), x), rel=1e-4, abs=1e-6)


def test_flattened_samples() -> None:
    x = RANDOM.normal(size=(5, 4, 9))
    expected = CovPoolFeatures(layout="channels_first").fit_transform(x)
    assert CovPoolFeatures(channels=4).fit_transform(x.reshape(5, -1)) == pytest.approx(expected)
    with pytest.raises(UsageError, match="36 values per sample, not a multiple of channels=5"):
        CovPoolFeatures(channels=5).fit(x.reshape(5, -1))


def test_sequences_of_different_lengths_need_no_padding() -> None:
    lengths = [9, 4, 12, 7]
    sequences = [RANDOM.normal(size=(length, 3)) for length in lengths]
    alone = [CovPoolFeatures().fit_transform(one[None])[0] for one in sequences]
    found = CovPoolFeatures(batch_size=3).fit_transform(sequences)
    assert found == pytest.approx(np.stack(alone))
    padded = np.full((4, 12, 3), np.nan)
    for row, one in zip(padded, sequences, strict=True):
        row[: len(one)] = one
    assert CovPoolFeatures(missing="mask").fit_transform(padded) == pytest.approx(np.stack(alone))
    with pytest.raises(ValueError, match="NaN"):
        CovPoolFeatures().fit(padded)


def test_a_position_with_one_nan_is_masked() -> None:
    x = RANDOM.normal(size=(2, 9, 3))
    x[0, 4, 1] = np.nan
    found = CovPoolFeatures(missing="mask").fit_transform(x)
    mask = ~np.isnan(x).any(-1)
    assert found == pytest.approx(rows(CovPool(3, dim=None, layout="channels_last"), np.nan_to_num(x), mask))


def test_a_grid_search_finds_the_covariance() -> None:
    """Two classes with the same mean and variances, and opposite correlation of two channels."""
    labels = np.tile([0, 1], 30)
    x = RANDOM.normal(size=(60, 50, 2))
    x[..., 1] += np.where(labels == 0, 1, -1)[:, None] * x[..., 0]
    pipeline = make_pipeline(CovPoolFeatures(), StandardScaler(), LogisticRegression())
    search = GridSearchCV(pipeline, {"covpoolfeatures__pool": ["gap", "isqrt_cov"]}, cv=3).fit(x, labels)
    gap, isqrt_cov = search.cv_results_["mean_test_score"]
    assert isqrt_cov > 0.95
    assert gap < 0.7


def test_pca_keeps_the_channels_that_vary_most() -> None:
    x = RANDOM.normal(size=(6, 40, 5)) * np.array([5.0, 0.01, 0.01, 3.0, 0.01])
    sequences = [one[: 30 + i] for i, one in enumerate(x)]
    pooled = CovPoolFeatures(dim=2, batch_size=4).fit(sequences)
    assert np.abs(pooled.components_).argmax(1).tolist() == [0, 3]
    everything = np.concatenate(sequences)
    _, vectors = np.linalg.eigh(np.cov(everything.T, bias=True))
    assert np.abs(pooled.components_) == pytest.approx(np.abs(vectors[:, ::-1].T[:2]), abs=1e-6)
    assert pooled.transform(sequences).shape == (6, 3)
    with pytest.raises(UsageError, match="dim=6 is more than the number of channels, 5"):
        CovPoolFeatures(dim=6).fit(x)


def test_names_of_the_columns_and_clones() -> None:
    pooled = clone(CovPoolFeatures(layout="channels_first")).fit(RANDOM.normal(size=(2, 2, 9)))
    assert list(pooled.get_feature_names_out()) == [f"covpoolfeatures{i}" for i in range(3)]
    assert pooled.n_features_in_ == pooled.n_channels_ == 2


def test_mistakes() -> None:
    pooled = CovPoolFeatures().fit(RANDOM.normal(size=(2, 9, 3)))
    with pytest.raises(UsageError, match="X has 4 channels, but CovPoolFeatures was fitted with 3"):
        pooled.transform(RANDOM.normal(size=(2, 9, 4)))
    with pytest.raises(UsageError, match=r"different numbers of channels: \[3, 4\]"):
        CovPoolFeatures().fit([RANDOM.normal(size=(9, 3)), RANDOM.normal(size=(9, 4))])
    with pytest.raises(UsageError, match="'moment_probing' has weights to train"):
        CovPoolFeatures("moment_probing").fit(RANDOM.normal(size=(2, 9, 40)))
    with pytest.raises(UsageError, match="missing must be one of"):
        CovPoolFeatures(missing="ignore").fit(RANDOM.normal(size=(2, 9, 3)))  # type: ignore[arg-type]


def test_images_through_a_backbone(tmp_path: Path) -> None:
    from PIL import Image

    from covpool.models import create_model

    model = create_model("test_resnet", num_classes=0, dim=None)
    arrays = RANDOM.integers(0, 255, (3, 80, 80, 3), dtype=np.uint8)
    files = []
    for i, pixels in enumerate(arrays):
        files.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(pixels).save(files[-1])
    found = CovPoolFeatures(backbone=model, batch_size=2).fit_transform(arrays)
    assert found.shape == (3, model.num_features * (model.num_features + 1) // 2)
    assert found == pytest.approx(CovPoolFeatures(backbone=model).fit_transform(files))
    pixels = torch.stack([model.transform(Image.open(file)) for file in files])
    with torch.no_grad():
        assert found == pytest.approx(model.eval()(pixels).numpy(), rel=1e-3, abs=1e-5)
