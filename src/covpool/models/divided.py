"""Bundles of a divided classifier: one model in several files, with an index as Hugging Face writes it.

The first file has the tensors that every process holds. Each process writes its rows of the classifier to
another file, as tensors such as ``head.classifier.weight.rows-0-250000``. ``model.safetensors.index.json``
maps tensors to files, and records the size and the hash of each file. The card has the hash of the index.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from covpool.errors import BundleError, StorageError
from covpool.models.card import INDEX, Card, parse, reason, shown
from covpool.models.model import PooledClassifier
from covpool.models.tensors import MAX_HEADER_BYTES, check_finite, check_tensors, open_file
from covpool.nn.divided import DividedLinear
from covpool.processes import Processes
from covpool.storage.files import check_regular, digest, digest_file, read_text, write_file
from covpool.storage.folders import replace_folder
from covpool.storage.manifest import Part, part_of, parts_from_json, parts_to_json
from covpool.terminal import human

LOGGER = logging.getLogger("covpool")
MAX_INDEX_BYTES = 64 << 20
CLASSIFIER = "head.classifier."
ROWS = re.compile(r"(head\.classifier\.(?:weight|bias))\.rows-(\d{1,12})-(\d{1,12})")
# Bytes of weights that are read at once when a classifier is streamed.
BLOCK_BYTES = 64 << 20


# The files of a classifier that is divided by class.
PART_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# Each part has the names of its tensors, under ``tensors``.
Index = dict[str, Part]


@contextlib.contextmanager
def replaced_by_all(folder: Path, processes: Processes) -> Iterator[Path]:
    """Give all processes one new folder to fill; it replaces ``folder`` at the end of ``with``.

    Use :meth:`Processes.together` inside: an error in one process must be raised in all.
    """
    with contextlib.ExitStack() as stack:
        yield processes.by_first(lambda: stack.enter_context(replace_folder(folder)))
        processes.by_first(stack.close)


def write_share(path: Path, tensors: Mapping[str, Tensor]) -> Part:
    """Write the tensors of this process.

    Raises:
        StorageError: if the folder that the first process made is not there.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = safetensors.torch.save(plain, metadata={"format": "pt"})
    try:
        write_file(path, data)
    except FileNotFoundError as error:
        raise StorageError(
            f"{path.parent} is not there: every process writes its share of the classifier, so put --out "
            "on a disk that all machines share"
        ) from error
    return part_of(data, tensors=list(plain))


def count_parameters(model: PooledClassifier) -> int:
    """Return the number of parameters, those of all processes for a divided classifier."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if not isinstance(classifier := model.head.classifier, DividedLinear):
        return count
    per_class = sum(parameter[0].numel() for parameter in classifier.parameters())
    return count + per_class * (classifier.num_classes - len(classifier.rows))


def split_rows(
    tensors: Mapping[str, Tensor], classifier: DividedLinear
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the rows of a process, under the names of files, and the tensors that all processes hold."""
    rows = f".rows-{classifier.rows.start}-{classifier.rows.stop}"
    share = {f"{name}{rows}": tensor for name, tensor in tensors.items() if name.startswith(CLASSIFIER)}
    return share, {name: tensor for name, tensor in tensors.items() if not name.startswith(CLASSIFIER)}


def read_index(folder: Path, card: Card) -> Index:
    """Read the index of a bundle, and check that its files have the sizes in it.

    Raises:
        BundleError: if the index or a file is not that of the card.
    """
    with open_file(folder, INDEX) as file:
        data = file.read(min(card.bytes, MAX_INDEX_BYTES) + 1)
    if digest(data) != card.sha256:
        raise BundleError(f"{INDEX} is damaged or belongs to another card: copy all files again")
    fields = parse(data, INDEX, MAX_INDEX_BYTES)
    try:
        parts = parts_from_json(fields["metadata"]["files"])
        names: dict[str, list[str]] = {name: [] for name in parts}
        for tensor, name in fields["weight_map"].items():
            names[name].append(tensor)
        index = {name: replace(part, facts={"tensors": names[name]}) for name, part in parts.items()}
    except (AttributeError, KeyError, TypeError, ValueError, StorageError) as error:
        raise BundleError(f"{INDEX} is not an index of weights: {reason(error)}") from error
    for name, part in index.items():
        if not PART_FILE.fullmatch(name):
            raise BundleError(f"{INDEX} names the file {shown(name)}, which no bundle has")
        with open_file(folder, name) as file:
            size = file.seek(0, 2)
        if size != part.bytes:
            raise BundleError(f"{name} has {size} bytes instead of {part.bytes}: copy it again")
    return index


def read_parts(
    folder: Path, card: Card, plan: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], nn.Module | None]:
    """Read the weights of a bundle of several files; a classifier that does not fit stays on the disk."""
    index = read_index(folder, card)
    largest = len(index) * MAX_HEADER_BYTES + sum(8 * tensor.numel() for tensor in plan.values())
    if sum(part.bytes for part in index.values()) > largest:
        raise BundleError("its weights are far larger than the network of its card")
    check_hashes(folder, index)
    is_streamed = must_stream(index)
    tensors = read_tensors(folder, index, range(card.config.num_classes), classifier=not is_streamed)
    read = {
        name: tensor for name, tensor in plan.items() if not (is_streamed and name.startswith(CLASSIFIER))
    }
    check_tensors(tensors, read)
    check_finite(tensors)
    classes, features = plan[f"{CLASSIFIER}weight"].shape
    return tensors, StreamedLinear(folder, index, features, classes) if is_streamed else None


def check_hashes(folder: Path, index: Index) -> None:
    """Raise BundleError if a file has changed. Files are read in pieces, so memory does not matter."""
    for name, part in index.items():
        with open_file(folder, name) as file:
            if digest_file(file) != part.sha256:
                raise BundleError(f"{name} is damaged (its hash differs): copy it again")


def read_tensors(folder: Path, index: Index, rows: range, *, classifier: bool = True) -> dict[str, Tensor]:
    """Read the shared tensors, and these rows of the classifier; no other row is read.

    Args:
        folder: the bundle.
        index: its index.
        rows: the rows.
        classifier: whether to read the classifier at all.

    Raises:
        BundleError: if a row is missing or there twice.
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, part in index.items():
        try:
            with safe_open(check_regular(folder / name, part.bytes), framework="pt") as file:
                for tensor in part.facts["tensors"]:
                    if (match := ROWS.fullmatch(tensor)) is None:
                        tensors[tensor] = file.get_tensor(tensor)
                        continue
                    start, stop = int(match[2]), int(match[3])
                    first, last = max(start, rows.start), min(stop, rows.stop)
                    if first < last and classifier:
                        read = file.get_slice(tensor)[first - start : last - start]
                        parts.setdefault(match[1], []).append((first, read))
        except (SafetensorError, OSError) as error:
            raise BundleError(f"{name} is not a safetensors file: {reason(error)}") from error
    for name, pieces in parts.items():
        tensors[name] = joined_rows(name, pieces, rows)
    return tensors


def joined_rows(name: str, parts: list[tuple[int, Tensor]], rows: range) -> Tensor:
    """Join rows that start at the numbers of ``parts``.

    Raises:
        BundleError: unless they are those of ``rows``, each once.
    """
    parts = sorted(parts, key=lambda part: part[0])
    starts = [start for start, _ in parts] + [rows.stop]
    ends = [rows.start] + [start + len(part) for start, part in parts]
    if starts != ends:
        raise BundleError(f"{name} does not have each of the rows {rows.start} to {rows.stop} once")
    return parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts])


class StreamedLinear(nn.Module):
    """A linear classifier whose weights are read from the files of a bundle at every call.

    It is for prediction only. The files stay open, so the bundle may be replaced meanwhile.
    """

    def __init__(self, folder: Path, index: Index, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, num_classes
        self._files: dict[str, Any] = {
            name: safe_open(check_regular(folder / name, part.bytes), framework="pt")
            for name, part in index.items()
        }
        self._places: dict[str, list[tuple[int, int, str, str]]] = {"weight": [], "bias": []}
        for file, part in index.items():
            for tensor in part.facts["tensors"]:
                if match := ROWS.fullmatch(tensor):
                    kind = match[1].removeprefix(CLASSIFIER)
                    self._places[kind].append((int(match[2]), int(match[3]), file, tensor))
        for kind, places in self._places.items():
            parts = [(start, torch.empty(stop - start, 0)) for start, stop, _, _ in places]
            joined_rows(f"{CLASSIFIER}{kind}", parts, range(num_classes))
            for start, stop, file, name in places:
                shape = [stop - start] + ([in_features] if kind == "weight" else [])
                if self._files[file].get_slice(name).get_shape() != shape:
                    raise BundleError(f"{shown(name)} has another shape than {tuple(shape)}")

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(B, in_features)`` to logits ``(B, num_classes)``."""
        logits = x.new_empty(len(x), self.num_classes)
        step = max(1, BLOCK_BYTES // (4 * self.in_features))
        biases = {start: (file, name) for start, _, file, name in self._places["bias"]}
        for first, last, file, name in self._places["weight"]:
            weights = self._files[file].get_slice(name)
            of_bias, name_of_bias = biases[first]
            bias = self._files[of_bias].get_tensor(name_of_bias).to(x)
            for start in range(0, last - first, step):
                block = weights[start : start + step].to(x)
                end = start + len(block)
                logits[:, first + start : first + end] = F.linear(x, block, bias[start:end])
        return logits

    def extra_repr(self) -> str:
        """The sizes."""
        return f"in_features={self.in_features}, num_classes={self.num_classes}"


def must_stream(index: Index) -> bool:
    """Return whether the weights do not fit into memory, with a warning if they do not."""
    needed, available = 2 * sum(part.bytes for part in index.values()), available_bytes()
    if available is None or needed <= available:
        return False
    LOGGER.warning(
        "the model needs %s of memory and %s are available: the classifier stays on the disk and is read for "
        "every batch. Larger batches read it less often",
        human(needed, "B"),
        human(available, "B"),
    )
    return True


def available_bytes() -> int | None:
    """Return the memory that a process may still use; ``None`` if the system does not say."""
    try:
        text = read_text("/proc/meminfo")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(match[1]) if match else None


def index_bytes(index: Index) -> bytes:
    """Return the content of the index."""
    files = {name: replace(part, facts={}) for name, part in sorted(index.items())}
    total = sum(part.bytes for part in index.values())
    tensors = {tensor: name for name in files for tensor in index[name].facts["tensors"]}
    fields = {"metadata": {"total_size": total, "files": parts_to_json(files)}, "weight_map": tensors}
    return json.dumps(fields, indent=1).encode()
