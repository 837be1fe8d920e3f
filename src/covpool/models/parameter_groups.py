"""Which parameter learns how fast: the paper's factor for the classifier, layer-wise decay by timm."""

from __future__ import annotations

from itertools import chain
from typing import Any

from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from covpool.models.model import PooledClassifier


def parameter_groups(
    model: PooledClassifier,
    lr: float,
    *,
    weight_decay: float = 0.0,
    classifier_factor: float = 5.0,
    layer_decay: float | None = None,
    decay_norms: bool = True,
) -> list[dict[str, Any]]:
    """Groups for any optimiser of torch, with ``lr`` and ``weight_decay`` set in each.

    Schedulers of torch and of timm start from each group's own ``lr``, so the ratios last. Frozen
    parameters are left out.

    Args:
        model: the model.
        lr: the learning rate of the pooling and of the backbone's last layers.
        weight_decay: of all parameters, those apart that ``decay_norms`` or the backbone's authors exempt.
        classifier_factor: the classifier's learning rate over ``lr``, hidden layers included. The paper
            fine-tunes with 5; training from scratch takes 1.
        layer_decay: each layer of the backbone learns this much slower than the next (0.75 is usual for
            transformers); ``None`` for one rate.
        decay_norms: decay weights of norms and biases too, as the paper does. Recipes with AdamW do not.

    Example:
        >>> model = covpool.create_model("resnet10t", dim=32, num_classes=10)
        >>> [(group["lr"], len(group["params"])) for group in parameter_groups(model, 0.01)]
        [(0.01, 45), (0.05, 2)]
    """
    exempt = model.no_weight_decay()
    if layer_decay is None:
        found = param_groups_weight_decay(
            model, weight_decay, weight_decay_exclude_1d=not decay_norms, no_weight_decay_list=exempt
        )
    else:
        found = param_groups_layer_decay(
            model,
            weight_decay,
            no_weight_decay_list=exempt,
            weight_decay_exclude_1d=not decay_norms,
            layer_decay=layer_decay,
        )
    first_order = [] if model.first_order is None else model.first_order.parameters()
    classifier = {id(parameter) for parameter in chain(model.head.parameters(), first_order)}
    # Groups of equal rate and decay are one: optimisers work group by group.
    groups: dict[tuple[float, float], list[Any]] = {}
    for group in found:
        for parameter in group["params"]:
            factor = classifier_factor if id(parameter) in classifier else group.get("lr_scale", 1.0)
            groups.setdefault((lr * factor, group["weight_decay"]), []).append(parameter)
    return [{"params": p, "lr": rate, "weight_decay": decay} for (rate, decay), p in groups.items()]
