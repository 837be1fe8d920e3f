"""Covariance pooling as a transformer of scikit-learn, for pipelines and grid search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from covpool.arguments import check_choice, check_whole
from covpool.device import chosen_device, has_float64
from covpool.errors import UsageError
from covpool.functional import covariance_merge, moments
from covpool.nn import CovPool
from covpool.nn.cov_pool import LAYOUTS, Layout

__all__ = ["CovPoolFeatures"]

DTYPES = (np.float64, np.float32)
Missing = Literal["error", "mask"]


# scikit-learn has no types.
class CovPoolFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Pool feature maps, sequences or images to one vector per sample.

    ``X`` is one of these:

    - an array ``(N, n, C)``, ``(N, C, H, W)`` or as ``layout`` says: maps, tokens, recordings;
    - a list of arrays of different lengths, one per sample, such as ``(n, C)``: they are padded and masked;
    - an array ``(N, channels·n)`` of flattened samples, channel by channel;
    - with ``backbone``, a list of paths or Pillow images, or an array ``(N, H, W, 3)`` of uint8.

    Without ``dim``, ``fit`` learns nothing and only remembers the number of channels.

    Args:
        pool: the pooling method, one of :func:`covpool.nn.methods` without weights of its own.
        dim: number of channels to reduce to, by a PCA of all positions; ``None`` for no reduction.
        channels: number of channels of flattened samples; ``None`` for 1.
        layout: position of the channels, as in :class:`covpool.nn.CovPool`. For EEG ``(N, channels, time)``
            use ``"channels_first"``.
        missing: ``"error"`` refuses NaN; ``"mask"`` ignores every position that has a NaN.
        backbone: a model of :func:`covpool.create_model` or :func:`covpool.load_model`, whose features of
            images are pooled. Its own pooling and classifier are not used.
        pool_options: options of the method, such as ``{"iteration": "paper"}``.
        batch_size: samples per batch.
        device: ``"cpu"``, an accelerator such as ``"mps"``, or ``"auto"`` for one if there is one.

    Attributes:
        n_channels_: number of channels seen in ``fit``.
        n_features_in_: the same; for flattened samples their length.
        components_: ``(dim, C)``, the directions of the PCA; ``None`` without ``dim``.

    Example:
        >>> from sklearn.linear_model import LogisticRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> recordings, labels = np.random.default_rng(0).normal(size=(20, 8, 100)), [0, 1] * 10
        >>> pipeline = make_pipeline(CovPoolFeatures(layout="channels_first"), LogisticRegression())
        >>> pipeline.fit(recordings, labels).predict(recordings).shape
        (20,)
    """

    def __init__(
        self,
        pool: str = "isqrt_cov",
        dim: int | None = None,
        *,
        channels: int | None = None,
        layout: Layout = "auto",
        missing: Missing = "error",
        backbone: Any = None,
        pool_options: Mapping[str, Any] | None = None,
        batch_size: int = 32,
        device: str = "cpu",
    ) -> None:
        self.pool = pool
        self.dim = dim
        self.channels = channels
        self.layout = layout
        self.missing = missing
        self.backbone = backbone
        self.pool_options = pool_options
        self.batch_size = batch_size
        self.device = device

    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the samples, and compute the PCA if ``dim`` is given.

        Args:
            X: samples, see the class.
            y: ignored.
        """
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("missing", self.missing, ("error", "mask"))
        check_whole("batch_size", self.batch_size)
        self.n_features_in_ = None
        samples = self._samples(X, reset=True)
        first, _ = next(self._batches(samples))
        self.n_channels_ = first.shape[1]
        if self.n_features_in_ is None:  # not set from the columns of flattened samples
            self.n_features_in_ = self.n_channels_
        self.components_ = None if self.dim is None else self._principal(samples, self.dim)
        self._n_features_out = self._pool().out_features
        return self

    def transform(self, X: Any) -> NDArray[Any]:
        """Return the pooled vectors, ``(N, D)``.

        Args:
            X: samples, see the class.
        """
        check_is_fitted(self)
        pool, rows = self._pool(), []
        for x, mask in self._batches(self._samples(X, reset=False)):
            if x.shape[1] != self.n_channels_:
                raise UsageError(
                    f"X has {x.shape[1]} channels, but {type(self).__name__} was fitted with "
                    f"{self.n_channels_}: check layout={self.layout!r}"
                )
            with torch.no_grad():
                if self.components_ is not None:
                    x = torch.as_tensor(self.components_).to(x) @ x
                rows.append(pool(x, mask).cpu().numpy())
        return np.concatenate(rows)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = self.missing == "mask"
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _pool(self) -> CovPool:
        pool = CovPool(
            self.dim or self.n_channels_,
            self.pool,
            dim=None,
            layout="channels_first",
            **(self.pool_options or {}),
        )
        if any(True for _ in pool.parameters()):
            raise UsageError(f"pool {self.pool!r} has weights to train: use another method here")
        return pool.to(chosen_device(self.device)).eval()

    def _samples(self, X: Any, *, reset: bool) -> Sequence[Any] | NDArray[Any]:
        """Return images, or checked features: ``(N, C, n)``, or ``(C, n)`` of each sample."""
        if self.backbone is not None:
            return list(X)
        finite: Any = True if self.missing == "error" else "allow-nan"
        options = {"dtype": DTYPES, "ensure_all_finite": finite}
        if isinstance(X, list | tuple) and len(X) and np.ndim(X[0]) > 1:
            return [self._channels_first(check_array(x, allow_nd=True, **options)[None])[0] for x in X]
        if getattr(X, "ndim", 2) > 2:
            return self._channels_first(check_array(X, allow_nd=True, **options))
        flat: NDArray[Any] = validate_data(self, X, reset=reset, **options)
        channels = self.channels or 1
        if flat.shape[1] % channels:
            raise UsageError(
                f"X has {flat.shape[1]} values per sample, not a multiple of channels={channels}"
            )
        return flat.reshape(len(flat), channels, -1)

    def _channels_first(self, x: NDArray[Any]) -> NDArray[Any]:
        last = self.layout == "channels_last" or (self.layout == "auto" and x.ndim == 3)
        first = np.moveaxis(x, -1, 1) if last else x
        return first.reshape(*first.shape[:2], -1)

    def _batches(self, samples: Sequence[Any] | NDArray[Any]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield features ``(B, C, n)`` and masks ``(B, n)``."""
        for start in range(0, len(samples), self.batch_size):
            batch = samples[start : start + self.batch_size]
            if self.backbone is not None:
                yield self._masked(self._image_features(batch))
            elif isinstance(batch, np.ndarray):
                yield self._masked(torch.tensor(batch))
            else:
                yield self._padded(batch)

    def _placed(self, x: Tensor) -> Tensor:
        device = chosen_device(self.device)
        return x.to(device) if has_float64(device) else x.float().to(device)

    def _masked(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self._placed(x)
        return x, ~x.isnan().any(1) if self.missing == "mask" else None

    def _padded(self, batch: Sequence[NDArray[Any]]) -> tuple[Tensor, Tensor]:
        channels = sorted({len(sample) for sample in batch})
        if len(channels) > 1:
            raise UsageError(f"samples have different numbers of channels: {channels}; check layout")
        longest = max(sample.shape[1] for sample in batch)
        dtype = np.result_type(*batch)
        x = np.full((len(batch), channels[0], longest), np.nan, dtype=dtype)
        for row, sample in zip(x, batch, strict=True):
            row[:, : sample.shape[1]] = sample
        tensor = self._placed(torch.from_numpy(x))
        return tensor, ~tensor.isnan().any(1)

    def _image_features(self, batch: Sequence[Any] | NDArray[Any]) -> Tensor:
        from PIL import Image

        from covpool.data.transforms import opened

        model = self.backbone.to(chosen_device(self.device)).eval()
        pictures = [Image.fromarray(image) if isinstance(image, np.ndarray) else image for image in batch]
        images = torch.stack([model.transform(opened(picture)) for picture in pictures])
        with torch.no_grad():
            x: Tensor = model.format.positions(model.forward_features(self._placed(images)))
        return (x.movedim(-1, 1) if model.format.layout == "channels_last" else x).flatten(2)

    def _principal(self, samples: Sequence[Any] | NDArray[Any], dim: int) -> NDArray[Any]:
        check_whole("dim", dim, expected="an int, or None for no reduction")
        if dim > self.n_channels_:
            raise UsageError(f"dim={dim} is more than the number of channels, {self.n_channels_}")
        parts = []
        for x, mask in self._batches(samples):
            of_samples = moments(x, weights=mask)
            parts.append(covariance_merge(zip(*of_samples, strict=True)))
        vectors = torch.linalg.eigh(covariance_merge(parts).covariance()).eigenvectors
        components = vectors.flip(-1)[:, :dim].T.cpu().numpy()
        # The sign of an eigenvector is arbitrary: make the largest value positive.
        largest = np.take_along_axis(components, np.abs(components).argmax(1, keepdims=True), axis=1)
        return np.asarray(components * np.sign(largest))
