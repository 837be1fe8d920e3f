"""``covpool predict`` and ``covpool embed``: see :func:`covpool.inference.bulk.infer`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from covpool.cli.main import Command
from covpool.errors import OtherJobError, UsageError
from covpool.inference import Embed, Files, Predict, Running
from covpool.storage.remote import Requests

if TYPE_CHECKING:
    from covpool.inference import Done


@dataclass(frozen=True)
class PredictArguments:
    """Predict the classes of any number of images, from one to a billion.

    It writes rows of id, label1, score1 and so on into a folder, with one file per tar or per 1,024 images.
    An unreadable image, or a URL without an answer, becomes a row with an error. Rerun the command to resume
    after an interruption.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: an image; a folder of images; a quoted pattern, as 'photos/*.jpg'; a CSV with a column path; a
            Parquet file, or a folder of them; or tars. A path or a remote URL, as s3://bucket/images.
        out: folder for the rows, or a remote URL; runs/predictions if not given, or runs/predictions-2 and so
            on if that folder belongs to another job.
    """

    bundle: str
    data: str
    out: str | None = None


@dataclass(frozen=True)
class EmbedArguments:
    """Write the embeddings that the classifier receives, for search and for other classifiers.

    It writes rows of id and vector into a folder, with one file per tar or per 1,024 images. An unreadable
    image, or a URL without an answer, becomes a row with an error. Rerun the command to resume after an
    interruption.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: an image; a folder of images; a quoted pattern, as 'photos/*.jpg'; a CSV with a column path; a
            Parquet file, or a folder of them; or tars. A path or a remote URL, as s3://bucket/images.
        out: folder for the rows, or a remote URL; runs/embeddings if not given, or runs/embeddings-2 and so
            on if that folder belongs to another job.
    """

    bundle: str
    data: str
    out: str | None = None


def run(arguments: Any, task: Predict | Embed, files: Files, running: Running, requests: Requests) -> "Done":
    """Run the task over all images, or resume it."""
    from covpool.inference.bulk import infer
    from covpool.terminal import Progress

    default = "runs/predictions" if isinstance(task, Predict) else "runs/embeddings"
    folders = itertools.chain([default], (f"{default}-{number}" for number in itertools.count(2)))
    with Progress("images") as progress:
        for out in folders if arguments.out is None else [arguments.out]:
            try:
                done = infer(arguments.bundle, arguments.data, out, task, files, running, progress, requests)
            except OtherJobError:
                if arguments.out is not None:
                    raise
                continue
            if done.error:
                raise UsageError(done.error)
            return done
    raise AssertionError("there is always another folder")


def text(result: "Done") -> str:
    """Return the number of rows, and how many are new."""
    from covpool.inference.bulk import report_text

    return report_text(result)


predict = Command(
    PredictArguments,
    "covpool predict runs/birds/bundle photos --format csv --out runs/predictions",
    run,
    text,
    OPTIONS=(Predict, Files, Running, Requests),
)
embed = Command(
    EmbedArguments,
    "covpool embed runs/birds/bundle photos --out runs/embeddings",
    run,
    text,
    OPTIONS=(Embed, Files, Running, Requests),
)
