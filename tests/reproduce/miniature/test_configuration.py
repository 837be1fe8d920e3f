from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covpool.models.create import build_model
from covpool.reproduce.experiments import EXPERIMENTS
from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.miniature.configuration import MINIATURE, Configuration


def built(configuration: Configuration) -> torch.nn.Module:
    return build_model(configuration.recipe(MINIATURE, Path("a.csv"), Path("runs")).model)


def test_networks_are_of_the_papers_form() -> None:
    alexnet = built(Configuration("alexnet", "isqrt_cov"))
    assert alexnet.forward_features(torch.randn(2, 3, 64, 64)).shape == (2, 64, 7, 7)
    assert alexnet.pool.reduction is None
    for network in ("resnet10", "resnet18", "resnet26"):
        resnet = built(Configuration(network, "isqrt_cov"))
        # The last stage keeps the resolution of the one before it, and 1x1 convolutions reduce its channels.
        assert resnet.forward_features(torch.randn(2, 3, 96, 96)).shape == (2, 128, 6, 6)
        assert resnet.pool.dim == 64
    assert built(Configuration("resnet10", "gap")).forward_features(torch.randn(2, 3, 96, 96)).shape[-1] == 3


def test_depths() -> None:
    for layers in (10, 18, 26):
        resnet = built(Configuration(f"resnet{layers}", "gap"))
        blocks = [m for name, m in resnet.backbone.named_modules() if name.startswith("layer")]
        convolutions = [m for m in blocks if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
        assert len(convolutions) + 2 == layers


def test_runs_that_differ_have_other_names() -> None:
    names = {}
    for experiment in EXPERIMENTS.values():
        if isinstance(experiment, Experiment):
            for _, configuration in experiment.configurations(3):
                assert names.setdefault(configuration.name, configuration) == configuration
    assert len(names) > 80


def test_an_unknown_network() -> None:
    with pytest.raises(ValueError, match="network is one of alexnet, resnet10"):
        Configuration("resnet50", "gap")
