"""Every key of a recipe, as files and command lines spell it: ``optimizer.weight_decay``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, get_origin, get_type_hints

import docstring_parser

from covpool.train.recipe import Recipe

# The common keys, by a word each; with these alone a person gets far.
SHORT = {
    "data": "data.path",
    "model": "model.backbone",
    "pool": "model.pool",
    "dim": "model.dim",
    "image_size": "model.image_size",
    "pretrained": "weights.pretrained",
    "bundle": "weights.bundle",
    "freeze": "weights.freeze",
    "epochs": "schedule.epochs",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "balance": "data.balance",
    "limit": "data.limit",
    "val_fraction": "data.val_fraction",
    "workers": "data.workers",
    "max_bad": "data.max_bad",
    "precision": "loop.precision",
    "accumulate": "loop.accumulate",
    "ema": "loop.ema",
    "deterministic": "loop.deterministic",
    "device": "loop.device",
    "max_skips": "loop.max_skips",
    "patience": "validation.patience",
    "checkpoint_steps": "checkpoint.steps",
    "checkpoint_minutes": "checkpoint.minutes",
}


class Option(NamedTuple):
    """A key's type, what it is if nobody says, and what it means."""

    hint: Any
    default: Any
    meaning: str


@functools.cache
def sections() -> dict[str, type[Any]]:
    """The parts of a recipe that have keys of their own."""
    hints = get_type_hints(Recipe).items()
    return {name: kind for name, kind in hints if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


@functools.cache
def options() -> dict[str, Option]:
    """All keys, in the order of the dataclasses."""
    default = Recipe()
    found = {
        f"{section}.{name}": option
        for section, kind in sections().items()
        for name, option in _fields(kind, getattr(default, section)).items()
    }
    own = _fields(Recipe, default).items()
    return {**{name: option for name, option in own if name not in sections()}, **found}


def flat(recipe: Recipe) -> dict[str, Any]:
    """Its values by key."""
    values = {}
    for key in options():
        section, _, name = key.rpartition(".")
        values[key] = getattr(getattr(recipe, section) if section else recipe, name)
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key as the mappings of mappings that files have."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (made.setdefault(section, {}) if section else made)[name] = value
    return made


def _fields(kind: type[Any], default: Any) -> dict[str, Option]:
    meanings = {
        attribute.arg_name: " ".join((attribute.description or "").split())
        for attribute in docstring_parser.parse(kind.__doc__ or "").params
    }
    return {
        name: Option(_readable(hint), getattr(default, name), meanings[name])
        for name, hint in get_type_hints(kind).items()
    }


def _readable(hint: Any) -> Any:
    """As jsonargparse shall see it: of ``dict[str, Any]`` it would read ``"1e-3"`` as a number."""
    return dict if get_origin(hint) is dict else hint
