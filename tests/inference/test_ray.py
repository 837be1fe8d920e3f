"""The Ray engine gives the rows of the local engine, even if an actor is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from covpool.cli.main import explained
from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing
from covpool.errors import LostProcessError
from covpool.inference import Embed, Files, Predict, Running, infer
from covpool.inference.bulk import TableWriter
from covpool.inference.place import open_place
from covpool.inference.tasks import Columns
from covpool.inference.work import Batch, Decoder, Predictor, Work, divide
from covpool.models.bundle import read_card
from tests.inference.small import hidden, pictures, rows_of, write_folder

ray = pytest.importorskip("ray", reason="Ray is not installed")

LOCAL = Running(batch_size=8, workers=0, device="cpu")
RAY = replace(LOCAL, engine="ray", actors=2)
FILES = Files("parquet", rows_per_file=20)

# Ray keeps files and sockets open until the process ends.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_worker_niceness", "0")  # or its workers get no time on a busy machine
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data"), pictures(70))


class Mortal(Predictor):
    """A predictor that is killed at the first image of the second unit."""

    marker: Path

    def __init__(self, marker: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.marker = marker

    def __call__(self, batch: Batch) -> Columns:
        if "00031.jpg" in batch["id"] and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


@pytest.mark.parametrize(
    "task", [Predict(top=3), Embed(project=10, dtype="float16")], ids=["predict", "embed"]
)
def test_rows_are_those_of_one_machine(tmp_path: Path, bundle: Path, data: Path, task: Any) -> None:
    one = infer(bundle, data, tmp_path / "local", task, FILES, LOCAL)
    two = infer(bundle, data, tmp_path / "ray", task, FILES, RAY)
    assert rows_of(tmp_path / "ray") == rows_of(tmp_path / "local")
    assert (one.bad_images, one.new_files) == (two.bad_images, two.new_files) == (10, 4)
    assert infer(bundle, data, tmp_path / "ray", task, FILES, LOCAL).new_files == 0


def test_a_killed_actor_is_replaced(tmp_path: Path, bundle: Path, data: Path) -> None:
    infer(bundle, data, tmp_path / "local", Predict(), FILES, LOCAL)

    from covpool.inference.ray_engine import run_ray

    images, marker, out = open_unlabeled(data), tmp_path / "killed", tmp_path / "ray"
    out.mkdir()
    work = Work(
        images,
        divide(images, FILES.rows_per_file),
        Decoder(Preprocessing.of(read_card(bundle).preprocessing)),
        partial(Mortal, marker, bundle, Predict(), "cpu"),
        TableWriter(open_place(out), "parquet"),
    )
    run_ray(work, RAY, lambda done, total: None)
    assert marker.exists()
    assert rows_of(out) == rows_of(tmp_path / "local")
    assert hidden(out) == []


def test_the_predictor_by_itself_is_a_function_for_map_batches(bundle: Path, data: Path) -> None:
    images = open_unlabeled(data)
    batch = Decoder(Preprocessing.of(read_card(bundle).preprocessing)).batch(images, range(8))
    columns = {**batch, "image": batch["image"].numpy()}
    mapped = ray.data.from_numpy(columns["image"]).rename_columns({"data": "image"})
    mapped = mapped.map_batches(
        lambda part: {"id": columns["id"], "error": columns["error"], "image": part["image"]}, batch_size=None
    )
    rows = mapped.map_batches(
        Predictor,
        fn_constructor_args=(bundle, Predict(top=1), "cpu"),
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=0.5,
    ).take_all()
    expected = Predictor(bundle, Predict(top=1), "cpu")(batch)
    assert [row["label1"] for row in rows] == expected["label1"].tolist()
    assert [row["error"] for row in rows] == expected["error"].tolist()


@pytest.mark.parametrize("engine", ["rows", "sums"])
def test_a_lost_node_is_told_in_a_sentence(
    tmp_path: Path, bundle: Path, data: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines await their tasks in the same place."""
    from ray.exceptions import LocalRayletDiedError, NodeDiedError, RayTaskError

    from covpool.closed_form.ray_sums import summed_by_ray

    def fail(error: Exception, *arguments: Any) -> None:
        raise error

    def run() -> None:
        if engine == "rows":
            infer(bundle, data, tmp_path / "out", Predict(), FILES, RAY)
        else:
            summed_by_ray(None, [None], RAY)  # type: ignore[arg-type, list-item]

    what = "covpool.inference.ray_engine._dataset" if engine == "rows" else "ray.put"
    for error in (NodeDiedError("node 1 is dead"), LocalRayletDiedError()):
        monkeypatch.setattr(what, partial(fail, error))
        with pytest.raises(
            LostProcessError, match=r"Ray stopped the job: .*Rerun the command to resume$"
        ) as found:
            run()
        assert explained(found.value, "")[1] == 2
    monkeypatch.setattr(what, partial(fail, RayTaskError("task", "KeyError", KeyError())))
    with pytest.raises(RayTaskError):  # a bug keeps its traceback
        run()


def test_what_cannot_be_written_is_told_in_a_sentence(tmp_path: Path, bundle: Path, data: Path) -> None:
    from covpool.inference.ray_engine import run_ray

    images = open_unlabeled(data)
    work = Work(
        images,
        divide(images, 50),
        Decoder(Preprocessing.of(read_card(bundle).preprocessing)),
        partial(Predictor, bundle, Predict(), "cpu"),
        TableWriter(open_place(tmp_path / "missing"), "parquet"),
    )
    with pytest.raises(ValueError, match=r"No such file or directory.*missing"):
        run_ray(work, RAY, lambda done, total: None)
