"""The last stage at its input's resolution: stride 1, no dilation, as the paper's networks have it.

Every architecture halves the resolution once more before pooling. Four times as many positions make a
better covariance, so the paper leaves that last halving out. It is found here by running the network on
the meta device (shapes only) and looking at which layers make the final map smaller than the one before:
the convolutions of the main path, the projection or the pooling of the shortcut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from covpool.models.backbones.surgery import leave_out

Run = Callable[[nn.Module], Tensor]

# Networks that would run, with an attention that no longer sees the whole map.
WHOLE_MAP = {"Nest"}


class KeepResolutionError(ValueError):
    """The architecture has no last stage whose stride can be taken away; the message says why."""


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
        _try_without_stride(probe, run, last_stage, wanted=halvings[-1].before)
    except KeepResolutionError:
        if last_stage == names:
            raise
        _try_without_stride(probe, run, names, wanted=halvings[-1].before)
        return names
    return last_stage


def _stage(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _try_without_stride(probe: nn.Module, run: Run, names: list[str], wanted: int) -> None:
    trial = copy.deepcopy(probe)
    remove_stride(trial, names)
    try:
        width = run(trial).shape[-1]
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise KeepResolutionError("without its stride its last stage does not fit together") from error
    if width != wanted:
        raise KeepResolutionError(f"without its stride its last map would be {width} wide, not {wanted}")


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
    # A 2x2 window has nothing left to do without its stride. Nor has one whose only office was to halve
    # the map: the paper drops the last max-pooling of AlexNet and VGG. In a branch beside convolutions
    # (Inception) a 3x3 window is a feature of its own and stays.
    if side % 2 == 0 or alone:
        leave_out(network, [name])
    else:
        pool.stride, pool.padding = 1, side // 2
