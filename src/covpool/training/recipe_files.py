"""Read, write and override recipes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_origin, get_type_hints

import docstring_parser
import yaml

from covpool.arguments import CLASS_TOKEN
from covpool.errors import TooLargeError, UsageError
from covpool.nn.pooling import METHODS, is_method
from covpool.storage.files import read_text, replace_file
from covpool.training.parser import SentenceParser
from covpool.training.recipe import Recipe

__all__ = [
    "change_pool",
    "make_recipe",
    "read_recipe",
    "recipe_names",
    "recipe_text",
    "write_recipe",
]

# The default recipes: for random initial weights, and for pretrained ones.
DEFAULT, PRETRAINED = "modern", "finetune"
# Keys of the model that belong to the classifier. A bundle sets the others.
CLASSIFIER = {"num_classes", "head", "rank", "hidden", "hidden_batchnorm", "drop_rate"}
# Keys that first-order pooling does not use.
SECOND_ORDER = ("model.dim", "model.keep_resolution", "model.features", "model.join")
# The complete recipe, with every key, has 3 KiB.
MAX_BYTES = 64 * 1024
RECIPES = Path(__file__).parents[1] / "recipes"
# Short names of the common keys.
SHORT = {"data": "data.path", "model": "model.backbone", "weights": "weights.path"}
_SAME = """
    model.pool model.dim model.image_size weights.pretrained weights.key_map weights.bundle weights.freeze
    schedule.epochs
    optimizer.lr optimizer.weight_decay data.balance data.limit data.val_fraction data.workers data.max_bad
    loop.precision loop.accumulate loop.ema loop.deterministic loop.device loop.max_skips validation.patience
"""
SHORT |= {key.rpartition(".")[2]: key for key in _SAME.split()}
SHORT |= {"checkpoint_steps": "checkpoint.steps", "checkpoint_minutes": "checkpoint.minutes"}


def read_recipe(
    name_or_path: str | Path | None = None, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Recipe:
    """Read a recipe by name or from a YAML file, and override some keys.

    A file has the keys that differ from the defaults of :class:`~covpool.training.recipe.Recipe`. If
    ``overrides`` change the pooling, the file's options for its own pooling are dropped.

    Args:
        name_or_path: one of :func:`recipe_names`, or a ``.yaml`` file. The default is ``finetune`` if
            ``overrides`` set weights, else ``modern``. Without a name, ``weights.bundle`` in ``overrides``
            also sets the network.
        overrides: values by key, such as ``{"optimizer.lr": 0.01, "batch_size": 64}``.

    Raises:
        UsageError: if a key or a value is wrong; the message names it and the file.

    Example:
        >>> recipe = read_recipe("resnet50-imagenet", {"schedule.epochs": 2})
        >>> recipe.batch_size, recipe.schedule.epochs, recipe.schedule.milestones
        (256, 2, (30.0, 45.0))
    """
    is_named = name_or_path is not None
    if name_or_path is None:
        has_weights = any(overrides.get(f"weights.{place}") for place in ("pretrained", "path", "bundle"))
        name_or_path = PRETRAINED if has_weights else DEFAULT
    file = _find(name_or_path)
    values = _checked(_values(file), f"{file}: ")
    if not is_named and overrides.get("weights.bundle"):
        from covpool.models.bundle import read_card  # here, because timm takes seconds to import

        network = vars(read_card(overrides["weights.bundle"]).config)
        values |= {f"model.{name}": value for name, value in network.items() if name not in CLASSIFIER}
    pool = overrides.get("model.pool")
    if (
        isinstance(pool, str)
        and (pool == CLASS_TOKEN or is_method(pool))
        and pool != values.get("model.pool", Recipe().model.pool)
    ):
        values = change_pool(values, pool)
    return make_recipe({**values, **_checked(overrides, "")})


def change_pool(values: Mapping[str, Any], pool: str) -> dict[str, Any]:
    """Return values by key for another pooling; ``gap`` makes the average-pooling baseline.

    The pooling options are dropped. First-order pooling also drops the width, the kept resolution and the
    joined average. A method that projects the channels itself drops the width.
    """
    dropped = ["model.pool_options"]
    if pool == CLASS_TOKEN or METHODS[pool].order == 1:
        dropped += SECOND_ORDER
    elif METHODS[pool].reduces:
        dropped += ["model.dim"]
    return {**{key: value for key, value in values.items() if key not in dropped}, "model.pool": pool}


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """Make a recipe from values by key, of the right types; the rest are defaults."""
    fields = nested({**flat(Recipe()), **values})
    return Recipe(
        **{name: sections()[name](**fields[name]) if name in sections() else fields[name] for name in fields}
    )


def write_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write every key of a recipe to a YAML file, for :func:`read_recipe`."""
    replace_file(path, recipe_text(recipe).encode())


def recipe_text(recipe: Recipe) -> str:
    """Return every key of a recipe as YAML."""
    content = _plain(nested(flat(recipe)))
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def recipe_names() -> dict[str, str]:
    """Return the names of covpool's recipes, with a sentence on each."""
    files = {file.stem: file for file in RECIPES.glob("*.yaml")}
    return {
        name: read_text(file).partition("\n")[0].removeprefix("# ") for name, file in sorted(files.items())
    }


class Option(NamedTuple):
    """The type, the default and the description of a key."""

    hint: Any
    default: Any
    meaning: str


@functools.cache
def sections() -> dict[str, type[Any]]:
    """Return the sections of a recipe and their classes."""
    hints = get_type_hints(Recipe).items()
    return {name: kind for name, kind in hints if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


@functools.cache
def options() -> dict[str, Option]:
    """Return all keys, in the order of the dataclasses."""
    default = Recipe()
    in_sections = {
        f"{section}.{name}": option
        for section, kind in sections().items()
        for name, option in _fields(kind, getattr(default, section)).items()
    }
    top_level = _fields(Recipe, default).items()
    return {**{name: option for name, option in top_level if name not in sections()}, **in_sections}


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return the values of a recipe by key."""
    values = {}
    for key in options():
        section, _, name = key.rpartition(".")
        values[key] = getattr(getattr(recipe, section) if section else recipe, name)
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key as the nested mappings of a file."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (result.setdefault(section, {}) if section else result)[name] = value
    return result


def _fields(kind: type[Any], default: Any) -> dict[str, Option]:
    meanings = {
        attribute.arg_name: " ".join((attribute.description or "").split())
        for attribute in docstring_parser.parse(kind.__doc__ or "").params
    }
    # Without the types inside a dict, where jsonargparse would read the string "1e-3" as a number.
    return {
        name: Option(dict if get_origin(hint) is dict else hint, getattr(default, name), meanings[name])
        for name, hint in get_type_hints(kind).items()
    }


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is untyped
    """Load plain values only: no Python objects and no aliases. ``1e-4`` is a number here."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases: a few lines of them can stand for billions of values, or contain themselves."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise UsageError(f"a recipe has no aliases, as in line {mark.line + 1}: write the value again")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Write for the loader: the string ``1e-4`` gets quotes."""


for _class in (_Loader, _Dumper):
    # YAML 1.1 requires a point and a sign in it.
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or isinstance(name_or_path, Path):
        return path
    names = recipe_names()
    if str(name_or_path) not in names:
        near = difflib.get_close_matches(str(name_or_path), names, n=1, cutoff=0.8)
        listed = f"did you mean {near[0]}?" if near else f"{', '.join(names)};"
        raise UsageError(f"{name_or_path} is not a recipe: {listed} pass your own recipe as a .yaml file")
    return RECIPES / f"{name_or_path}.yaml"


def _values(file: Path) -> dict[str, Any]:
    """Return the values of a file by key."""
    try:
        content = yaml.load(read_text(file, MAX_BYTES), Loader=_Loader)
    except TooLargeError as error:
        raise UsageError(f"{file} is not a recipe: it is larger than {MAX_BYTES // 1024} KiB") from error
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a recipe: it must be a mapping of keys to values")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in sections():
            values[str(key)] = value
        elif isinstance(value, dict):
            values |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            raise UsageError(f"{file}: {key} must be a mapping of keys to values; got {value!r}")
    return values


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values, each of the type of its key."""
    for key in values:
        if key not in options():
            raise UsageError(f"{where}a recipe has no {key}{_near(key)}")
    try:
        parsed = _parser().parse_object(nested(_plain(values)), defaults=False)
    except ValueError as error:
        raise UsageError(f"{where}{error}") from error
    return {key: parsed[key] for key in values}


def _near(key: str) -> str:
    """Suggest a key for an unknown one, as the end of a sentence."""
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
    """Turn tuples into lists and paths into strings."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value
