"""Read, write and override recipes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_origin, get_type_hints

import docstring_parser
import yaml

from covpool.durable import replace_file
from covpool.errors import UsageError
from covpool.models.config import CLASS_TOKEN
from covpool.nn.pooling import METHODS
from covpool.train.parser import SentenceParser
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


__all__ = [
    "change_pool",
    "make_recipe",
    "read_recipe",
    "recipe_names",
    "recipe_text",
    "write_recipe",
]

# Where none is named: from first weights by chance, and from a backbone's.
DEFAULT, PRETRAINED = "modern", "finetune"

# What weights were trained with, and belongs to them.
NETWORK = (
    "backbone",
    "pool",
    "dim",
    "keep_resolution",
    "features",
    "join",
    "normalize",
    "image_size",
    "pool_options",
    "backbone_options",
    "preprocessing",
)

# What a recipe says for a covariance, and an average has no use for.
SECOND_ORDER = ("model.dim", "model.keep_resolution", "model.features", "model.join")


def read_recipe(
    name_or_path: str | Path | None = None, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Recipe:
    """A recipe by its name or from a YAML file, with some keys changed.

    A file has the keys that differ from the defaults of :class:`~covpool.train.recipe.Recipe`. Where
    ``overrides`` have another pooling, what the file says for its own is left out: see :func:`change_pool`.

    Args:
        name_or_path: one of :func:`recipe_names`, or a file, ``.yaml``. If not given, ``finetune`` where
            ``overrides`` bring weights, and ``modern`` where not; with the network of a bundle, where one is
            given.
        overrides: values by key, such as ``{"optimizer.lr": 0.01, "batch_size": 64}``.

    Raises:
        ValueError: with a sentence on what is wrong, and in which file.

    Example:
        >>> recipe = read_recipe("resnet50-imagenet", {"schedule.epochs": 2})
        >>> recipe.batch_size, recipe.schedule.epochs, recipe.schedule.milestones
        (256, 2, (30.0, 45.0))
    """
    is_named = name_or_path is not None
    if name_or_path is None:
        brought = any(overrides.get(f"weights.{place}") for place in ("pretrained", "path", "bundle"))
        name_or_path = PRETRAINED if brought else DEFAULT
    file = _find(name_or_path)
    values = _checked(_values(file), f"{file}: ")
    if not is_named and overrides.get("weights.bundle"):
        values |= _network_of(overrides["weights.bundle"])
    pool = overrides.get("model.pool")
    if pool in (*METHODS, CLASS_TOKEN) and pool != values.get("model.pool", Recipe().model.pool):
        values = change_pool(values, pool)
    return make_recipe({**values, **_checked(overrides, "")})


def _network_of(bundle: str) -> dict[str, Any]:
    """The keys of the network of a bundle."""
    from covpool.models.bundle import read_card  # here, because timm takes seconds to import

    config = read_card(bundle).config
    return {f"model.{name}": getattr(config, name) for name in NETWORK}


def change_pool(values: Mapping[str, Any], pool: str) -> dict[str, Any]:
    """Values by key for the same network with another pooling; ``gap`` makes the first-order twin.

    The options of the pooling are left out, and before a first-order method also its width, the resolution
    kept for it, and the average joined to it; before a method that projects the channels itself, the width.
    """
    other = ["model.pool_options"]
    if pool == CLASS_TOKEN or METHODS[pool].order == 1:
        other += SECOND_ORDER
    elif METHODS[pool].reduces:
        other += ["model.dim"]
    return {**{key: value for key, value in values.items() if key not in other}, "model.pool": pool}


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """From values by key, of the right types; what is not there is as by default."""
    own = nested({**flat(Recipe()), **values})
    return Recipe(
        **{name: sections()[name](**own[name]) if name in sections() else own[name] for name in own}
    )


def write_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write every key of a recipe; :func:`read_recipe` gives it back."""
    replace_file(path, recipe_text(recipe).encode())


def recipe_text(recipe: Recipe) -> str:
    """Every key of a recipe, as YAML."""
    content = _plain(nested(flat(recipe)))
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def recipe_names() -> dict[str, str]:
    """The recipes that come with covpool, and what each is, in a sentence."""
    files = {path.stem: file for file in _folder().iterdir() if (path := Path(file.name)).suffix == ".yaml"}
    return {
        name: file.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        for name, file in sorted(files.items())
    }


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is untyped
    """Plain values alone: a tag that names a Python object is an error. ``1e-4`` is a number here."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """What the loader reads; the word ``1e-4`` gets quotes."""


for _class in (_Loader, _Dumper):
    # YAML 1.1 wants a point and a sign in it, which nobody remembers.
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def _folder() -> Traversable:
    return resources.files("covpool") / "recipes"


def _find(name_or_path: str | Path) -> Traversable:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or isinstance(name_or_path, Path):
        return path
    names = recipe_names()
    if str(name_or_path) not in names:
        near = difflib.get_close_matches(str(name_or_path), names, n=1, cutoff=0.8)
        listed = f"did you mean {near[0]}?" if near else f"{', '.join(names)};"
        raise UsageError(f"{name_or_path} is none of the recipes: {listed} one of your own is a file, .yaml")
    return _folder() / f"{name_or_path}.yaml"


def _values(file: Traversable) -> dict[str, Any]:
    """What a file says, by key."""
    try:
        content = yaml.load(file.read_text("utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no YAML that can be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} has no keys and values, as a recipe has")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in sections():
            values[str(key)] = value
        elif isinstance(value, dict):
            values |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            raise UsageError(f"{file}: {key} has keys of its own; got {value!r}")
    return values


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values, each of the type that its key wants."""
    for key in values:
        if key not in options():
            raise UsageError(f"{where}a recipe has no {key}{_near(key)}")
    try:
        parsed = _parser().parse_object(nested(_plain(values)), defaults=False)
    except ValueError as error:
        raise UsageError(f"{where}{error}") from error
    return {key: parsed[key] for key in values}


def _near(key: str) -> str:
    """What may have been meant by a key that there is not, as the end of a sentence."""
    section, _, name = str(key).rpartition(".")
    names = [option.rpartition(".")[2] for option in options() if option.rpartition(".")[0] == section]
    if section and names and not difflib.get_close_matches(name, names, n=1):
        return f"; {section} has {', '.join(names)}"
    near = difflib.get_close_matches(str(key), options(), n=1, cutoff=0.5)
    return f"; is it {near[0]}?" if near else ""


@functools.cache
def _parser() -> SentenceParser:
    parser = SentenceParser()
    parser.hints = {key: option.hint for key, option in options().items()}
    for key, option in options().items():
        parser.add_argument(f"--{key}", type=option.hint, default=option.default)
    return parser


def _plain(value: Any) -> Any:
    """As YAML has it: lists for tuples, words for paths."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value
