"""The options of ``covpool fit``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from covpool.arguments import FROZEN_DIM, Device, KeyMap, check_choice, check_same, check_whole, did_you_mean
from covpool.errors import StorageError, UsageError, UsageTypeError
from covpool.evaluate.probe.options import AVERAGE, ProbeOptions
from covpool.storage.files import MAX_TEXT_BYTES, json_bytes, read_file, read_json, replace_file
from covpool.storage.folders import held, remove_folder
from covpool.storage.manifest import Manifest

PROTOCOL = "fit"
# Folder of the sums, and the file there with facts about them.
SUMS, MANIFEST = "sums", "manifest.json"
# Options that may differ when a fit is resumed or repeated in its folder.
FREE = ("finetune", "epochs", "workers", "device", "keep_sums", "engine", "actors", "ray_address")
FILE = "options.json"


@dataclass(frozen=True)
class FitOptions:
    """The network, the heads to compare, and fine-tuning.

    Attributes:
        model: a backbone of timm; by default one whose pretrained weights are installed, else resnet50.
        weights: file with weights of the backbone; its pretrained weights if not given.
        key_map: how parameter names of the file become timm's: ``order``, or a mapping of prefixes.
        image_size: image size in pixels; the backbone's own if not given.
        heads: pooling methods to compare; differences are to ``gap``.
        dim: channels that second-order heads pool, after PCA.
        basis: folder of an earlier fit whose PCA to use, for models that will be merged.
        balance: weight every class equally, for unbalanced training images.
        keep_sums: save the sums of the training images, for ``covpool update``, ``forget`` and ``merge``.
        seeds: number of random seeds of heads that are trained, such as ``attentive``.
        finetune: also train the whole network, from the best head.
        epochs: number of epochs of fine-tuning.
        batch_size: images per batch of the backbone.
        compile: compile the backbone: faster for thousands of images, after up to a minute.
        workers: processes that read images.
        device: ``auto`` uses a GPU if there is one.
        engine: ``local`` for this machine or the processes of torchrun, ``ray`` for a cluster.
        actors: number of Ray processes, each with a network.
        ray_address: address of a Ray cluster; Ray starts on this machine if not given.
    """

    model: str | None = None
    weights: str | None = None
    key_map: KeyMap = None
    image_size: int | None = None
    heads: Sequence[str] = (AVERAGE, "isqrt_cov")
    dim: int = FROZEN_DIM
    basis: str | None = None
    balance: bool = False
    keep_sums: bool = False
    seeds: int = 3
    finetune: bool = False
    epochs: int = 12
    batch_size: int = 32
    compile: bool = False
    workers: int = 2
    device: Device = "auto"
    engine: Literal["local", "ray"] = "local"
    actors: int = 1
    ray_address: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(dict.fromkeys(self.heads)))
        for name in ("batch_size", "epochs", "actors"):
            check_whole(name, getattr(self, name))
        check_choice("engine", self.engine, ("local", "ray"))
        self.probe()  # checks the others

    def changed(self, **fields: Any) -> FitOptions:
        """Return the options with some fields replaced."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in fields:
            if name not in names:
                near = did_you_mean(name, names) or ": covpool.closed_form.FitOptions lists them"
                raise UsageTypeError(f"fit has no option {name!r}{near}")
        return dataclasses.replace(self, **fields)

    def probe(self, heads: Sequence[str] | None = None) -> ProbeOptions:
        """Return the options of a comparison of heads that are trained."""
        from covpool.models.weights import default_backbone  # here: it imports torch

        return ProbeOptions(
            self.model or default_backbone(),
            heads=self.heads if heads is None else heads,
            dim=self.dim,
            pretrained=self.weights is None,
            weights=self.weights,
            key_map=self.key_map,
            image_size=self.image_size,
            seeds=self.seeds,
            workers=self.workers,
            device=self.device,
        )

    @contextmanager
    def hold(self, folder: Path, data: str) -> Iterator[Path]:
        """Hold the folder of the results, which is new or of a fit with these options."""
        from covpool.evaluate.results import mark_folder, prepare_folder  # here: it imports torch

        is_new = not folder.exists()
        prepare_folder(folder, PROTOCOL, data)
        with held(folder):
            before = read_json(folder / FILE) if (folder / FILE).exists() else self._fixed(data)
            check_same(folder, self._fixed(data), before)
            _check_unchanged(folder)
            mark_folder(folder, PROTOCOL)
            empty = {path.name for path in folder.iterdir()}
            try:
                yield folder
            except Exception:
                if is_new and {path.name for path in folder.iterdir()} == empty:
                    remove_folder(folder)  # of a mistake that was found before the work
                raise

    def note(self, folder: Path, data: str) -> None:
        """Write the options into the folder, once the network is built: wrong options leave no file."""
        replace_file(folder / FILE, json_bytes(self._fixed(data)))

    def _fixed(self, data: str) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in FREE} | {"data": data}
        fixed: dict[str, Any] = json.loads(json.dumps(values))
        return fixed


def _check_unchanged(folder: Path) -> None:
    """Raise if the model of a fit was changed: another fit into the folder would undo that."""
    try:
        about: Any = Manifest.read(read_file(folder / SUMS / MANIFEST, MAX_TEXT_BYTES)).about
    except (FileNotFoundError, StorageError):  # no sums, or damaged ones
        return
    if isinstance(about, dict) and about.get("is_changed"):
        raise UsageError(
            f"{folder} was changed by covpool update, forget or merge, and a new fit would undo that: use "
            "another --out"
        )


def default_folder(data: str | Path) -> Path:
    """Return ``runs/`` and the name of the data."""
    path = Path(os.path.abspath(data))  # not resolved: a link keeps its own name
    return Path("runs") / ((path.stem if path.is_file() else path.name) or "fit")
