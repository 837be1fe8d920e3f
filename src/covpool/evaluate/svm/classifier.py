"""SVMs as the classifier of a model: a bundle like any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from covpool.evaluate.svm.problem import LinearScores
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier


def with_svm(model: PooledClassifier, scores: LinearScores, classes: Sequence[str]) -> PooledClassifier:
    """A model of the same backbone, pooling and hidden layers, whose logits are the scores of the SVMs.

    Args:
        model: that made the features.
        scores: of what its classifier receives, of length one (of a joined model, each part).
        classes: the classes' names.
    """
    config = dataclasses.replace(model.config, normalize="l2", num_classes=len(classes))
    with torch.random.fork_rng(devices=[]):
        made = build_model(config)
    weights = torch.from_numpy(scores.weights)
    second = made.head.hidden_size
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    state["head.classifier.weight"] = weights[:, :second].contiguous()
    state["head.classifier.bias"] = torch.from_numpy(scores.bias)
    if made.first_order is not None:
        state["first_order.weight"] = weights[:, second:].contiguous()
    made.load_state_dict(state)
    made.pretrained_cfg = {**model.pretrained_cfg, "num_classes": len(classes)}
    made.classes = tuple(classes)
    return made.eval()
