"""Build a timm or torchvision network, remove its expansion layer, keep the resolution of its last stage.

EfficientNet, MobileNet and similar networks expand the last stage by a 1x1 convolution before the average.
Covariance pooling is more accurate, and much smaller, on the channels before the expansion.

Most architectures halve the resolution once more in the last stage. The paper leaves that out: four times as
many positions give a better covariance. The layers that halve are found by running the network on the meta
device.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

from covpool.errors import KeepResolutionError, UnsupportedBackboneError, UsageError
from covpool.hub import silence
from covpool.models.alexnet import AlexNet
from covpool.models.weights import PACKAGES, where_to_get

# Backbones that are not in timm.
NETWORKS: dict[str, type[nn.Module]] = {"alexnet": AlexNet}


def check_backbone(name: str) -> None:
    """Raise unless a backbone has this name."""
    if name not in NETWORKS and not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, [*timm.list_models(), *NETWORKS], n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() has all names"
        raise UnsupportedBackboneError(f"timm has no backbone {name!r}: {hint}")


def build_network(name: str, options: Mapping[str, Any], *, pretrained: bool = False) -> nn.Module:
    """Build the network without its classifier, with timm."""
    if name in NETWORKS:
        if pretrained:
            raise UsageError(f"there are no pretrained weights of {name}; leave pretrained=False")
        return NETWORKS[name](**options)
    check_backbone(name)
    if taken := {"num_classes", "global_pool", "output_stride"} & options.keys():
        raise UnsupportedBackboneError(f"{', '.join(taken)} is not for the backbone: see create_model")
    if pretrained:
        return _pretrained_network(name, options)
    plain = name.partition(".")[0] if name in PACKAGES else name  # timm does not know a package's tag
    network: nn.Module = timm.create_model(plain, num_classes=0, **options)
    return network


def _pretrained_network(name: str, options: Mapping[str, Any]) -> nn.Module:
    try:
        with _quick_hub():
            network: nn.Module = timm.create_model(name, pretrained=True, num_classes=0, **options)
    except (OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(
            f"timm's weights of {name} are not available: {why}; {where_to_get(name)}"
        ) from error
    return network


@contextlib.contextmanager
def _quick_hub() -> Iterator[None]:
    """Let timm download from the Hugging Face hub if it answers; otherwise use only files in its cache."""
    import timm.models._hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    download, why = hub.hf_hub_download, silence()
    hub.hf_hub_download = functools.partial(  # type: ignore[assignment]  # timm's is a partial too
        download, local_files_only=bool(why)
    )
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise ConnectionError(f"{why}, and they are not in the cache") if why else error from None
    finally:
        hub.hf_hub_download = download


def builder(name: str) -> object:
    """Return the class or function that builds a network; ``None`` if there is none of this name."""
    plain = name.partition(".")[0]
    return NETWORKS.get(name) or (timm.model_entrypoint(plain) if timm.is_model(plain) else None)


def takes_image_size(network: nn.Module) -> bool:
    """Whether the number of positions is part of the network, as in most transformers."""
    # A subclass may hand its arguments on without naming them.
    constructors = (vars(cls)["__init__"] for cls in type(network).__mro__ if "__init__" in vars(cls))
    return any("img_size" in inspect.signature(method).parameters for method in constructors)


def leave_out(network: nn.Module, names: Iterable[str]) -> None:
    """Replace each named module by the identity.

    A sequence is replaced by an empty sequence, because timm's checkpointing iterates over its layers.
    """
    for name in names:
        parent, _, child = name.rpartition(".")
        is_sequence = isinstance(network.get_submodule(name), nn.Sequential)
        setattr(network.get_submodule(parent), child, nn.Sequential() if is_sequence else nn.Identity())


def unused_parts(network: nn.Module, used: Container[int]) -> list[str]:
    """Return the outermost modules with parameters that the features do not depend on.

    Layers of timm's own pooling (a norm after it, hidden layers, attention pooling) would remain as weights
    without gradients, and DistributedDataParallel waits for every gradient.
    """
    modules: list[str] = []
    for name, module in network.named_modules():
        inside_one = any(name.startswith(f"{outer}.") for outer in modules)
        parameters = list(module.parameters())
        if name and not inside_one and parameters and not any(id(p) in used for p in parameters):
            modules.append(name)
    return modules


def norm_before_pooling(network: nn.Module) -> None:
    """Move the LayerNorm that some transformers (BEiT, EVA) have after average pooling to before the pooling.

    Its weights fit there, and covariance pooling needs normalized features, as in other transformers.
    """
    norm, after = getattr(network, "norm", None), getattr(network, "fc_norm", None)
    if isinstance(norm, nn.Identity) and after is not None and any(True for _ in after.parameters()):
        network.norm, network.fc_norm = after, nn.Identity()


def parameters_behind(result: Tensor) -> set[int]:
    """The ids of the leaves from which autograd would reach ``result`` (no gradient is computed)."""
    leaves: set[int] = set()
    seen: set[torch.autograd.graph.Node] = set()
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    return leaves


# Where each class of timm keeps its expansion, "-1" being the last child of a sequence. Listed by hand,
# because the last 1x1 convolution of a residual block (every ResNet) looks the same to an automatic
# search and must stay.
EXPANSIONS: dict[str, tuple[str, ...]] = {
    "ByobNet": ("final_conv",),
    "EfficientNet": ("conv_head", "bn2"),
    "FastVit": ("final_conv",),
    "GhostNet": ("blocks.-1",),
    "MobileNetV3": ("blocks.-1",),
    "NormFreeNet": ("final_conv",),
    "RegNet": ("final_conv",),
    "RepGhostNet": ("blocks.-1",),
    "RexNet": ("features.-1",),
}


def expansion(network: nn.Module) -> list[str]:
    """The names of the modules that make the expansion; empty where there is none."""
    names = []
    for name in EXPANSIONS.get(type(network).__name__, ()):
        parent, _, child = name.rpartition(".")
        if child == "-1":
            children = [child for child, _ in network.get_submodule(parent).named_children()]
            name = f"{parent}.{children[-1]}"
            if not _is_one_pointwise_convolution(network.get_submodule(name)):
                continue  # the last child is a stage like the others, as in LCNet
        if any(True for _ in network.get_submodule(name).parameters()):
            names.append(name)
    return names


def applies_alone(network: nn.Module) -> bool:
    """Return whether the expansion, applied to the features, gives the output of the whole network.

    NFNet does not: it applies its last activation to the features, so the expansion gets another input.
    """
    return type(network).__name__ != "NormFreeNet"


def _is_one_pointwise_convolution(module: nn.Module) -> bool:
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return len(convolutions) == 1 and convolutions[0].kernel_size == (1, 1)


Run = Callable[[nn.Module], Tensor]

# Networks that would run, with an attention that no longer sees the whole map.
WHOLE_MAP = {"Nest"}


@dataclass(frozen=True)
class Halving:
    """A layer that makes the map smaller, by name, with the widths before and after it."""

    name: str
    before: int
    after: int


def layers_to_keep_resolution(probe: nn.Module, run: Run) -> list[str]:
    """The layers to give to :func:`remove_stride` so that the last stage keeps its resolution.

    Args:
        probe: the network on the meta device; a copy of it is changed, to see whether it works.
        run: gives a network's last map, ``(B, C, H, W)``.

    Raises:
        KeepResolutionError: with the reason.
    """
    if type(probe).__name__ in WHOLE_MAP:
        raise KeepResolutionError("attention of its last stage is over a map of one size")
    halvings = last_halvings(probe, run)
    if not halvings:
        raise KeepResolutionError("no convolution or pooling halves its last map")
    names = [halving.name for halving in halvings]
    # The last stage's alone, where that will do: attention of the stage before may halve its keys for itself
    # (PVT, MobileNetV4), and must be left to.
    last_stage = [name for name in names if _stage(name) == _stage(names[-1])]
    try:
        _try_without_stride(probe, run, last_stage, expected=halvings[-1].before)
    except KeepResolutionError:
        if last_stage == names:
            raise
        _try_without_stride(probe, run, names, expected=halvings[-1].before)
        return names
    return last_stage


def _stage(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _try_without_stride(probe: nn.Module, run: Run, names: list[str], expected: int) -> None:
    trial = copy.deepcopy(probe)
    remove_stride(trial, names)
    try:
        width = run(trial).shape[-1]
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise KeepResolutionError("without its stride its last stage does not fit together") from error
    if width != expected:
        raise KeepResolutionError(f"without its stride its last map would be {width} wide, not {expected}")


def last_halvings(network: nn.Module, run: Run) -> list[Halving]:
    """The layers that bring about the width of the final map from one about twice as wide, as they run."""
    seen: dict[str, Halving] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            x = inputs[0] if inputs else None
            if isinstance(x, Tensor) and isinstance(output, Tensor) and x.ndim == output.ndim == 4:
                seen[name] = Halving(name, x.shape[-1], output.shape[-1])

        return hook

    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        final = run(network).shape[-1]
    finally:
        for handle in handles:
            handle.remove()
    return [h for h in seen.values() if h.after == final and final < h.before < 3 * final]


def remove_stride(network: nn.Module, names: list[str]) -> None:
    """Make the named layers keep the size of their input."""
    for name in names:
        layer = network.get_submodule(name)
        if isinstance(layer, nn.Conv2d):
            _convolve_at_stride_one(layer, name)
        elif isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            _pool_at_stride_one(network, layer, name, alone=len(names) == 1)
        elif type(layer).__name__ == "BlurPool2d":  # timm puts it where a stride is, and nowhere else
            leave_out(network, [name])
        else:
            raise KeepResolutionError(f"{name} is a {type(layer).__name__}, of which no stride 1 is known")
        _tell_parents(network, name)


def _tell_parents(network: nn.Module, name: str) -> None:
    """The blocks around a layer that note its stride: timm makes new convolutions from the note."""
    while name := name.rpartition(".")[0]:
        block: Any = network.get_submodule(name)
        if getattr(block, "stride", None) in (2, (2, 2)):
            block.stride = 1 if block.stride == 2 else (1, 1)


def _convolve_at_stride_one(layer: nn.Conv2d, name: str) -> None:
    if any(side % 2 == 0 for side in layer.kernel_size):
        shape = "x".join(map(str, layer.kernel_size))
        raise KeepResolutionError(
            f"{name} joins patches by a {shape} convolution, which has no stride-1 form"
        )
    layer.stride = (1, 1)
    # timm's convolutions with TensorFlow's padding work it out from the input at each call.
    pads_itself = type(layer).__name__.endswith("Same")
    if layer.padding == (0, 0) and not pads_itself:
        layer.padding = (layer.kernel_size[0] // 2, layer.kernel_size[1] // 2)


def _pool_at_stride_one(
    network: nn.Module, pool: nn.MaxPool2d | nn.AvgPool2d, name: str, alone: bool
) -> None:
    side = pool.kernel_size if isinstance(pool.kernel_size, int) else pool.kernel_size[0]
    # Without its stride, a 2x2 window is useless, and so is a layer that only halves the map: the paper drops
    # the last max-pooling of AlexNet and VGG. In a branch parallel to convolutions (Inception), a 3x3 window
    # computes features and stays.
    if side % 2 == 0 or alone:
        leave_out(network, [name])
    else:
        pool.stride, pool.padding = 1, side // 2
