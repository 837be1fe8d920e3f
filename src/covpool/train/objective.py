"""What is minimised: cross-entropy, with smoothed labels, mixed images and weights of classes."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from covpool.data.image_set import ImageSet, class_counts
from covpool.train.recipe import LossOptions, Recipe


class Objective:
    """The loss of each image.

    Args:
        options: of the recipe.
        classes: how many there are.
        class_weights: of the loss, by the class of an image; ``None`` for equal ones.
    """

    def __init__(self, options: LossOptions, classes: int, class_weights: Tensor | None = None) -> None:
        self.smoothing = options.label_smoothing
        self.class_weights = class_weights
        mixes = []
        if options.mixup > 0:
            mixes.append(v2.MixUp(alpha=options.mixup, num_classes=classes))
        if options.cutmix > 0:
            mixes.append(v2.CutMix(alpha=options.cutmix, num_classes=classes))
        self._mix = v2.RandomChoice(mixes) if mixes else None

    def mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and their targets: labels, or where images were mixed, the share of each class."""
        if self._mix is None:
            return images, labels
        images, targets = self._mix(images, labels)
        return images, targets

    def __call__(self, logits_BK: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, in float32."""
        losses_B = F.cross_entropy(
            logits_BK.float(), targets, reduction="none", label_smoothing=self.smoothing
        )
        if self.class_weights is None:
            return losses_B
        is_mixed = targets.ndim == 2
        weights_B = targets @ self.class_weights if is_mixed else self.class_weights[targets]
        return losses_B * weights_B


def make_objective(recipe: Recipe, images: ImageSet, device: torch.device) -> Objective:
    """That of a recipe, for the images it learns from."""
    is_weighted = recipe.data.balance == "weights"
    weights = balancing_weights(images).to(device) if is_weighted else None
    return Objective(recipe.loss, len(images.classes), weights)


def balancing_weights(images: ImageSet) -> Tensor:
    """A weight for each class, inverse to its number of images; the mean over images is 1.

    A class without images has the weight 0.
    """
    counts = class_counts(images)
    present = counts > 0
    weights = np.where(present, len(images) / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights.astype(np.float32))
