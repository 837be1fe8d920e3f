"""Networks of timm as backbones: what is left out, what keeps its resolution, how to read the features."""

from covpool.models.backbones.backbone import Backbone, make_backbone
from covpool.models.backbones.network import UnsupportedBackboneError
from covpool.models.backbones.probe import FeatureFormat
from covpool.models.backbones.resolution import KeepResolutionError

__all__ = ["Backbone", "FeatureFormat", "KeepResolutionError", "UnsupportedBackboneError", "make_backbone"]
