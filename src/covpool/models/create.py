"""Create models from the name of a backbone, and group their parameters for an optimizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from covpool.arguments import Fusion, Join, KeyMap, Layers
from covpool.errors import BundleError, HubError, UsageError
from covpool.hub import HUB, HubAddress
from covpool.models.backbone import make_backbone
from covpool.models.card import WEIGHTS, check_backbone_options
from covpool.models.config import HIDDEN, Dim, Features, HeadKind, ModelConfig, Normalize, pool_of
from covpool.models.model import PooledClassifier
from covpool.models.weights import PACKAGES, file_origin
from covpool.nn.pooling import DEFAULT_METHOD

LOGGER = logging.getLogger("covpool")
# Options of timm.create_model that say where its weights are. They are not part of the network.
LOADING = ("cache_dir", "pretrained_cfg", "pretrained_cfg_overlay")
CONFIG = "config.json"  # of timm's repositories on the Hub


def create_model(
    backbone: str,
    pool: str = DEFAULT_METHOD,
    dim: Dim = "auto",
    num_classes: int = 1000,
    pretrained: bool = False,
    *,
    checkpoint_path: str | Path | None = None,
    key_map: KeyMap = None,
    keep_resolution: bool | None = None,
    features: Features | None = None,
    layers: Layers = "last",
    fusion: Fusion = "each",
    head: HeadKind = "linear",
    rank: int | None = None,
    hidden: Sequence[int] = HIDDEN,
    hidden_batchnorm: bool = False,
    drop_rate: float = 0.0,
    join: Join | None = None,
    normalize: Normalize | None = None,
    image_size: int | None = None,
    freeze: Literal["backbone"] | None = None,
    pool_options: Mapping[str, Any] | None = None,
    backbone_options: Mapping[str, Any] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    global_pool: str | None = None,
    features_only: bool = False,
    **keywords: Any,
) -> PooledClassifier:
    """Create a model: a timm backbone, CNN or transformer, with covariance pooling and a classifier.

    Args:
        backbone: a name of timm (``timm.list_models()``), also of a repository on the Hugging Face Hub
            (``"hf-hub:timm/resnet50.a1_in1k"``); or ``"alexnet"``, the paper's.
        pool: a method of :func:`covpool.nn.methods`. ``"gap"`` is the average-pooling baseline: timm's
            backbone unchanged, with a linear classifier. ``"cls"`` uses a transformer's class token.
        dim: channels after the 1x1 reduction; ``None`` for no reduction. ``"auto"``: the paper's 256 if the
            backbone has more channels and the method does not project them itself, else no reduction.
        num_classes: number of classes; 0 for no classifier: the model then returns the pooled vector.
        pretrained: load the pretrained weights of the backbone: from an installed package of
            ``covpool.models.weights.PACKAGES``, else timm's.
        checkpoint_path: a file with weights of the backbone, ``.safetensors`` or ``.pth``.
        key_map: how the file's names become timm's; see
            :func:`covpool.models.weights.load_backbone`.
        keep_resolution: run the last stage at stride 1, as in the paper: 14×14 instead of 7×7 positions at
            224 pixels. ``None``: if the architecture allows it (else the log says why). ``True`` raises if
            not.
        features: features before (``"stage"``) or after (``"head"``) the channel expansion of EfficientNet,
            MobileNet and similar networks. ``None``: before it for covariances.
        layers: layers of the backbone to pool: ``"last"``, the ``"last4"`` or ``"all-stages"``, by timm's
            ``forward_intermediates``. Their maps are brought to one grid.
        fusion: how several layers are pooled: ``"each"`` by itself, or all channels together (``"concat"``);
            see :class:`covpool.nn.fusion.LayersPool`.
        head: ``"linear"``, or ``"mlp"``, with ``hidden`` layers before the classifier.
        rank: a bottleneck before a linear classifier, for many classes.
        hidden: widths of the hidden layers of ``head="mlp"``.
        hidden_batchnorm: BatchNorm after each of them.
        drop_rate: dropout before the classifier and after hidden layers.
        join: add first-order logits, from the class token (``"cls"``) or from average pooling (``"gap"``).
        normalize: ``"l2"`` divides the input of the classifier by its norm, for linear SVMs; with ``join``,
            each of the two parts by its own norm.
        image_size: image size (pixels), ``None`` for the backbone's default. Transformers are built for it.
        freeze: ``"backbone"`` trains only the pooling and the classifier.
        pool_options: options of the method, such as ``{"iteration": "paper"}``, and of
            :class:`covpool.nn.CovPool`.
        backbone_options: options of ``timm.create_model`` as a dict, such as ``{"drop_path_rate": 0.1}``.
        preprocessing: ``mean``, ``std``, ``interpolation``, ``crop_pct`` and ``crop_mode`` that differ from
            those of the backbone.
        global_pool: timm's name of ``pool``: ``"avg"`` is ``"gap"``, ``"token"`` is ``"cls"``.
        features_only: not supported; the error names the alternatives.
        keywords: other options of ``timm.create_model``, such as ``in_chans=1`` and ``drop_path_rate=0.1``.

    Raises:
        TypeError: if the backbone has no such option.

    Example:
        >>> model = create_model("resnet10t", dim=64, num_classes=200)
        >>> model(torch.randn(2, 3, 224, 224)).shape
        torch.Size([2, 200])
        >>> model.forward_features(torch.randn(2, 3, 224, 224)).shape
        torch.Size([2, 512, 14, 14])
    """
    if head == "linear" and (tuple(hidden) != HIDDEN or hidden_batchnorm):
        raise UsageError('hidden and hidden_batchnorm are for head="mlp"')
    if features_only:
        raise UsageError(
            "features_only=True leaves nothing to pool: use timm.create_model(..., features_only=True), or "
            "forward_intermediates of the model that create_model returns"
        )
    if global_pool is not None:
        if pool not in (DEFAULT_METHOD, pool_of(global_pool)):
            raise UsageError(f"pool={pool!r} and global_pool={global_pool!r} differ: pass one of them")
        pool = pool_of(global_pool)
    loading = {name: keywords.pop(name) for name in LOADING if name in keywords}
    config = ModelConfig(
        backbone=backbone,
        num_classes=num_classes,
        pool=pool,
        dim=dim,
        keep_resolution=keep_resolution,
        features=features,
        layers=layers,
        fusion=fusion,
        head=head,
        rank=rank,
        hidden=tuple(hidden),
        hidden_batchnorm=hidden_batchnorm,
        drop_rate=drop_rate,
        join=join,
        normalize=normalize,
        image_size=image_size,
        pool_options=dict(pool_options or {}),
        backbone_options={**(backbone_options or {}), **keywords},
        preprocessing=dict(preprocessing or {}),
    )
    model = build_model(
        config, pretrained=pretrained, checkpoint_path=checkpoint_path, key_map=key_map, loading=loading
    )
    if freeze is not None:
        model.freeze(freeze)
    return model


def build_model(
    config: ModelConfig,
    *,
    pretrained: bool = False,
    checkpoint_path: str | Path | None = None,
    key_map: KeyMap = None,
    loading: Mapping[str, Any] | None = None,
) -> PooledClassifier:
    """Create a model from a :class:`~covpool.models.config.ModelConfig`; see :func:`create_model`.

    ``loading`` has options of ``timm.create_model`` that are not part of the network: those in ``LOADING``.
    """
    if key_map is not None and checkpoint_path is None:
        raise UsageError("key_map says how to read a file: pass checkpoint_path= too")
    origin: dict[str, str] = {}
    pretrained = pretrained and checkpoint_path is None
    if config.backbone.startswith(HUB):
        name, options, settings, address = _timm_backbone(config.backbone, weights=pretrained)
        size = options.pop("img_size", None)
        config = dataclasses.replace(
            config,
            backbone=name,
            backbone_options={**options, **config.backbone_options},
            image_size=config.image_size or (size[0] if isinstance(size, list) else size),
        )
        loading, origin = {"pretrained_cfg": settings, **(loading or {})}, {"hub": str(address)}
    package = None if loading else PACKAGES.get(config.backbone)
    if package and pretrained and (file := package.file()):
        _announce(config.backbone, str(package), package.network)
        config = pretrained_config(config)
        pretrained, checkpoint_path, key_map = False, file, package.key_map
        origin["package"] = str(package)
    if checkpoint_path is not None:
        origin |= file_origin(checkpoint_path)
    second_order = config.is_second_order
    # The average-pooling baseline keeps the stride and the expansion of timm's backbone.
    features: Features = config.features or ("stage" if second_order else "head")
    keep = config.keep_resolution if second_order or config.keep_resolution is not None else False
    backbone = make_backbone(
        config.backbone,
        keep=keep,
        features=features,
        with_expansion=config.join == "gap",
        image_size=config.image_size,
        layers=config.layers,
        options=config.backbone_options,
        pretrained=pretrained,
        checkpoint_path=checkpoint_path,
        key_map=key_map,
        loading=loading,
    )
    model = PooledClassifier(dataclasses.replace(config, features=features), backbone)
    if pretrained:
        cfg = model.pretrained_cfg
        tag = f".{cfg['tag']}" if cfg.get("tag") else ""
        origin |= file_origin(cfg["file"]) if cfg.get("file") else {"timm": f"{cfg['architecture']}{tag}"}
    model.initial_weights = origin if pretrained or checkpoint_path is not None else {}
    return model


def pretrained_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the network and the preprocessing of an installed package of weights."""
    package = PACKAGES.get(config.backbone)
    if package is None or package.file() is None:
        return config
    preprocessing = {**package.preprocessing, **config.preprocessing}
    return dataclasses.replace(config, backbone=package.network, preprocessing=preprocessing)


@functools.cache
def _announce(backbone: str, package: str, network: str) -> None:
    """Log once that weights are a package's and not timm's."""
    padding = "" if backbone == network else f" They fit {network}, which pads as TensorFlow does."
    LOGGER.warning("The weights of %s are from the installed package %s.%s", backbone, package, padding)


def parameter_groups(
    model: PooledClassifier,
    lr: float,
    *,
    weight_decay: float = 0.0,
    classifier_factor: float = 5.0,
    layer_decay: float | None = None,
    decay_norms: bool = True,
) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimizer, each with its ``lr`` and ``weight_decay``.

    Schedulers of torch and timm start from the ``lr`` of each group, so the ratios stay. Frozen parameters
    are omitted.

    Args:
        model: the model.
        lr: learning rate of the pooling and of the last layers of the backbone.
        weight_decay: weight decay of all parameters that ``decay_norms`` and the backbone's authors do not
            exempt.
        classifier_factor: learning rate of the classifier and its hidden layers, relative to ``lr``. The
            paper fine-tunes with 5, and trains from scratch with 1.
        layer_decay: learning rate of each backbone layer relative to the next (0.75 is usual for
            transformers); ``None`` for one learning rate.
        decay_norms: apply weight decay to norms and biases, as the paper does. Recipes with AdamW do not.

    Example:
        >>> model = covpool.create_model("resnet10t", dim=32, num_classes=10)
        >>> [(group["lr"], len(group["params"])) for group in parameter_groups(model, 0.01)]
        [(0.01, 45), (0.05, 2)]
    """
    exempt = model.no_weight_decay()
    if layer_decay is None:
        timm_groups = param_groups_weight_decay(
            model, weight_decay, weight_decay_exclude_1d=not decay_norms, no_weight_decay_list=exempt
        )
    else:
        timm_groups = param_groups_layer_decay(
            model,
            weight_decay,
            no_weight_decay_list=exempt,
            weight_decay_exclude_1d=not decay_norms,
            layer_decay=layer_decay,
        )
    first_order = [] if model.first_order is None else model.first_order.parameters()
    classifier = {id(parameter) for parameter in chain(model.head.parameters(), first_order)}
    # Merge groups of equal learning rate and weight decay: optimizers work group by group.
    groups: dict[tuple[float, float], list[Any]] = {}
    for group in timm_groups:
        for parameter in group["params"]:
            factor = classifier_factor if id(parameter) in classifier else group.get("lr_scale", 1.0)
            groups.setdefault((lr * factor, group["weight_decay"]), []).append(parameter)
    return [{"params": p, "lr": rate, "weight_decay": decay} for (rate, decay), p in groups.items()]


def _timm_backbone(text: str, *, weights: bool) -> tuple[str, dict[str, Any], dict[str, Any], HubAddress]:
    """Read a repository of timm's ``push_to_hf_hub``.

    Args:
        text: the address.
        weights: download the weights too. Only ``model.safetensors`` is read: a pickle could run code.

    Returns:
        The name of the network, its options, its ``pretrained_cfg``, and the address with its commit.
    """
    from timm.models._hub import _parse_model_cfg, load_cfg_from_json

    address = HubAddress.of(text)
    config = address.file(CONFIG)
    address = dataclasses.replace(address, revision=config.parent.name)
    try:
        settings, name, options = _parse_model_cfg(load_cfg_from_json(config), {})
        options = {key: options[key] for key in options if key not in ("num_classes", "global_pool")}
        check_backbone_options(options)
    except (AttributeError, BundleError, KeyError, TypeError, ValueError) as error:
        raise HubError(f"{address}: its {CONFIG} does not describe a network of timm: {error}") from None
    settings = {key: value for key, value in settings.items() if key not in ("url", "hf_hub_id", "file")}
    if weights:
        settings["file"] = str(address.file(WEIGHTS))
    return name, options, settings, address
