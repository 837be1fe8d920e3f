"""One network of every module timm has: it becomes second-order, or a sentence says why not."""

from __future__ import annotations

import math
import re
import sys

import pytest
import timm
import torch

import covpool
from covpool.errors import UnsupportedBackboneError

# Their features have several scales at once, or consist of the class token alone.
UNSUPPORTED = {"crossvit", "efficientvim", "pit"}
# Without those of networks that covpool registers.
MODULES = sorted(module for module in timm.list_modules() if f"timm.models.{module}" in sys.modules)
SMALL = r"tiny|nano|pico|atto|femto|xxs|small|_s\d|_b0|_m0|_t\d|18|_xs|_s$"


def one_of(module: str) -> str:
    names = timm.list_models(module=module)
    return next((name for name in names if re.search(SMALL, name)), names[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # timm's own
@pytest.mark.parametrize("module", MODULES)
def test_module_of_timm(module: str) -> None:
    name = one_of(module)
    if module in UNSUPPORTED:
        with pytest.raises(UnsupportedBackboneError, match=f"^{name} "):
            covpool.create_model(name)
        return
    with torch.device("meta"):
        model = covpool.create_model(name, dim=8, num_classes=5)
    features = model.forward_features(torch.empty(2, *model.pretrained_cfg["input_size"], device="meta"))
    positions = model.format.positions(features)
    n = math.prod(positions.shape[1:]) // model.num_features
    assert math.isqrt(n) ** 2 == n, f"{tuple(features.shape)} was not read as a square grid"
    assert 9 <= n <= 9216
    assert model.num_features >= 32
    assert model.forward_head(features).shape == (2, 5)
    assert not [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
