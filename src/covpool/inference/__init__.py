"""Run networks over images: predictions, embeddings and features of any number of images."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from covpool import lazily
from covpool.arguments import DEVICES, Device, check_choice, check_whole

if TYPE_CHECKING:
    from covpool.inference.bulk import Done, infer
    from covpool.storage.remote import Requests

__all__ = ["Done", "Embed", "Files", "Predict", "Requests", "Running", "infer"]

__getattr__ = lazily(
    __name__,
    "eval",
    {
        "covpool.inference.bulk": "Done infer",
        "covpool.storage.remote": "Requests",
    },
)

Precision = Literal["float32", "bfloat16"]
Format = Literal["parquet", "csv"]
# The largest number of predictions for which the format auto is CSV.
CSV_IMAGES = 1000


@dataclass(frozen=True)
class Predict:
    """The top-k classes, with their probabilities.

    Attributes:
        top: number of classes per image.
        flip: average the logits with those of the horizontally flipped image.
        precision: precision of the network.
    """

    top: int = 5
    flip: bool = False
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        check_whole("top", self.top, at_least=1)
        check_choice("precision", self.precision, ("float32", "bfloat16"))


@dataclass(frozen=True)
class Embed:
    """The embedding: the vector that the classifier receives, scaled to length 1.

    Attributes:
        raw: do not scale the embeddings to length 1.
        project: dimensions after a random projection that preserves distances; no projection if not given.
        seed: random seed of the projection.
        dtype: data type of the embeddings.
        flip: average with the embedding of the horizontally flipped image, before anything else.
        precision: precision of the network.
    """

    raw: bool = False
    project: int | None = None
    seed: int = 0
    dtype: Literal["float32", "float16"] = "float32"
    flip: bool = False
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("float32", "float16"))
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        if self.project is not None:
            check_whole("project", self.project, at_least=1)


@dataclass(frozen=True)
class Files:
    """How rows are divided into files.

    Attributes:
        format: ``csv``, ``parquet``, or ``auto``: CSV for predictions of up to 1,000 images, else Parquet.
        rows_per_file: largest number of rows in a file.
    """

    format: Literal["auto", "csv", "parquet"] = "auto"
    rows_per_file: int = 1024

    def __post_init__(self) -> None:
        check_choice("format", self.format, ("auto", "csv", "parquet"))
        check_whole("rows_per_file", self.rows_per_file, at_least=1)


@dataclass(frozen=True)
class Running:
    """How a job runs. The rows do not depend on it, except for the last bits of a value.

    Attributes:
        batch_size: images per batch.
        workers: processes that read and decode images; 0 reads in the main process. Ray ignores it.
        device: device of the network; ``auto`` is a GPU if there is one.
        engine: ``local`` for this machine, ``ray`` for a cluster (pip install 'covpool[scale]').
        actors: number of Ray processes, each with a network.
        ray_address: address of a Ray cluster; Ray starts on this machine if not given.
        retry: compute the rows again whose URL gave no answer.
        compile: compile the network with torch.compile: faster, after up to a minute.
        verify: compare the hashes of finished files with the recorded ones, not only sizes and last bytes.
    """

    batch_size: int = 64
    workers: int = 2
    device: Device = "auto"
    engine: Literal["local", "ray"] = "local"
    actors: int = 1
    ray_address: str | None = None
    retry: bool = False
    compile: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ("local", "ray"))
        check_choice("device", self.device, DEVICES)
        for name, least in (("batch_size", 1), ("workers", 0), ("actors", 1)):
            check_whole(name, getattr(self, name), at_least=least)
