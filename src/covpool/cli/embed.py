"""``covpool embed``: see :func:`covpool.inference.bulk.infer`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from covpool.cli.bulk_task import run_task, text

if TYPE_CHECKING:
    from covpool.inference import Done

__all__ = ["EXAMPLE", "Arguments", "run", "text"]

EXAMPLE = "covpool embed runs/birds/bundle photos --out embeddings"


@dataclass(frozen=True)
class Arguments:
    """Write the vectors that the classifier receives, for search and for other classifiers.

    Rows of id and vector go into a folder, a file for every tar or every thousand images. If it is killed,
    the same command goes on where it was. A bad image becomes a row with an error.

    Attributes:
        bundle: the folder of a trained model.
        data: an image; a folder of images; a CSV with a column path; a Parquet file, or a folder of them;
            or tars. A path or an address, as s3://bucket/images.
        out: the folder for the rows, or an address.
        raw: leave vectors as long as they are; otherwise each has length one.
        project: to so many numbers, by a random projection that keeps distances; all of them if not given.
        seed: of the projection.
        dtype: of the numbers.
        flip: average with the mirrored image's vector, first of all.
        format: of the files.
        rows_per_file: the most that a file has.
        precision: of the network.
        device: ``auto`` takes a GPU if there is one.
        batch_size: images that the network sees at once.
        workers: processes that read and decode.
        engine: ``ray`` for a cluster; it needs covpool[scale].
        actors: with Ray, processes with a network each.
        ray_address: of a cluster of Ray; one is started on this machine if not given.
    """

    bundle: str
    data: str
    out: str = "embeddings"
    raw: bool = False
    project: int | None = None
    seed: int = 0
    dtype: Literal["float32", "float16"] = "float32"
    flip: bool = False
    format: Literal["parquet", "csv"] = "parquet"
    rows_per_file: int = 1024
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_size: int = 64
    workers: int = 2
    engine: Literal["local", "ray"] = "local"
    actors: int = 1
    ray_address: str | None = None


def run(arguments: Arguments) -> "Done":
    """Do it, or go on with it."""
    from covpool.inference import Embed

    return run_task(arguments, Embed)
