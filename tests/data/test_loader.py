"""Loaders: bit-identical batches for any number of workers and processes, and from any start."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covpool.data.image_set import ImageSet, Subset
from covpool.data.loader import Batch, EvaluationLoader, TrainingLoader
from covpool.data.order import BalancedOrder, FolderOrder, Order, ShardOrder
from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import write_shards
from covpool.data.sources import open_images
from covpool.data.transforms import Augmentation, Preprocessing, evaluation_transform, training_transform
from covpool.errors import DataError
from tests.data.memory_images import MemoryImages, memory_images
from tests.data.parquet_files import write_parquet
from tests.data.pictures import SPARROWS, jpeg, needs_sparrows

# The tests use three workers, even on a machine with two cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SMALL = Preprocessing(16)
RANDOM = training_transform(SMALL, Augmentation(colour="lighting"))
PLAIN = evaluation_transform(SMALL)
COUNT, BATCH = 31, 7
STEPS = COUNT // BATCH

Make = Callable[[], tuple[ImageSet, Order]]


@pytest.fixture(params=["folder", "shards", "parquet", "balanced"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return a function that creates a dataset and its order, as in a new process."""
    if request.param == "folder":
        return lambda: (memory_images(COUNT), FolderOrder(COUNT, BATCH, seed=3))
    if request.param == "balanced":
        return lambda: (memory_images(COUNT), BalancedOrder(memory_images(COUNT).labels, BATCH, seed=3))
    if request.param == "parquet":
        path = write_parquet(memory_images(COUNT), tmp_path / "train.parquet")
    else:
        path = tmp_path / "shards"
        write_shards(memory_images(COUNT), path, shard_bytes=6_000)

    def grouped() -> tuple[ImageSet, Order]:
        images = open_images(path)
        sizes = images.group_sizes()
        assert sizes is not None
        return images, ShardOrder(sizes, BATCH, seed=3, window=3)

    return grouped


def loader(make: Make, **options: Any) -> TrainingLoader:
    return TrainingLoader(*make(), RANDOM, seed=5, **options)


def epochs(loader: TrainingLoader, cursor: int = 0, end: int = 2 * STEPS) -> Iterator[Batch]:
    """Yield the batches of a training loop."""
    while cursor < end:
        for batch in itertools.islice(loader.from_cursor(cursor), end - cursor):
            yield batch
            cursor += 1


def assert_same(found: Iterable[Batch], expected: Iterable[Batch]) -> None:
    for batch, other in zip(found, expected, strict=True):
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.labels, other.labels)
        assert torch.equal(batch.images, other.images)
        assert list(batch.bad) == list(other.bad)


def test_the_number_of_workers_changes_nothing(make: Make) -> None:
    expected = list(epochs(loader(make)))
    assert [batch.images.shape for batch in expected] == [(BATCH, 3, 16, 16)] * 2 * STEPS
    for workers in (1, 3):
        assert_same(epochs(loader(make, workers=workers)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_how_workers_are_started_changes_nothing(make: Make, method: Any) -> None:
    assert_same(epochs(loader(make, workers=2, start_method=method)), epochs(loader(make)))


def test_where_it_starts_changes_nothing(make: Make) -> None:
    expected = list(epochs(loader(make)))
    for cursor in range(2 * STEPS):
        assert_same(epochs(loader(make), cursor), expected[cursor:])
    # The same holds for workers that were stopped in the middle of other batches.
    used = loader(make, workers=2)
    next(used.from_cursor(2))
    assert_same(epochs(used, 1), expected[1:])
    assert_same(epochs(used, STEPS + 2), expected[STEPS + 2 :])


def by_step(make: Make, world_size: int, cursor: int, end: int) -> list[list[tuple[int, int, bytes]]]:
    """Return the samples of each step, over all processes."""
    ranks = [
        epochs(loader(make, rank=rank, world_size=world_size), cursor, end) for rank in range(world_size)
    ]
    steps = []
    for batches in zip(*ranks, strict=True):
        assert max(len(batch.ids) for batch in batches) - min(len(batch.ids) for batch in batches) <= 1
        triples = [zip(b.ids.tolist(), b.labels.tolist(), b.images, strict=True) for b in batches]
        steps.append(sorted((i, label, x.numpy().tobytes()) for part in triples for i, label, x in part))
    return steps


def test_resuming_on_other_numbers_of_processes(make: Make) -> None:
    expected = by_step(make, 1, 0, 2 * STEPS)
    assert all(len(step) == BATCH for step in expected)
    changing = (
        by_step(make, 2, 0, 3) + by_step(make, 1, 3, STEPS + 1) + by_step(make, 2, STEPS + 1, 2 * STEPS)
    )
    assert changing == expected
    for world_size in (3, 7):
        assert by_step(make, world_size, 0, STEPS) == expected[:STEPS]


def test_an_epoch_has_each_sample_once(make: Make) -> None:
    images, order = make()
    if order.repeats:
        pytest.skip("drawn with replacement")
    for cursor in (0, STEPS):
        ids = torch.cat([batch.ids for batch in loader(make).from_cursor(cursor)]).tolist()
        assert len(ids) == len(set(ids)) == COUNT // BATCH * BATCH
        labels = torch.cat([batch.labels for batch in loader(make).from_cursor(cursor)]).tolist()
        assert labels == [int(images.labels[i]) for i in ids]


def test_a_sample_that_comes_again_looks_different() -> None:
    order = BalancedOrder([0] * 19 + [1], 10, seed=0)
    one, two = TrainingLoader(memory_images(20), order, RANDOM).from_cursor(0)
    assert (one.ids == 19).sum() > 1, "twice in a batch"
    assert (two.ids == 19).any(), "and in another"
    again = torch.cat([batch.images[batch.ids == 19] for batch in (one, two)])
    assert len(again.flatten(1).unique(dim=0)) == len(again)


def test_other_seeds_give_other_pixels() -> None:
    images, order = memory_images(COUNT), FolderOrder(COUNT, BATCH, seed=0)
    one, two = (next(TrainingLoader(images, order, RANDOM, seed=seed).from_cursor(0)) for seed in (0, 1))
    assert torch.equal(one.ids, two.ids)
    assert not torch.equal(one.images, two.images)
    later = next(TrainingLoader(images, order, RANDOM, seed=0).from_cursor(STEPS))
    common = set(one.ids.tolist()) & set(later.ids.tolist())
    assert common
    for i in common:
        assert not torch.equal(one.images[one.ids == i], later.images[later.ids == i])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_random_numbers_are_left_alone(make: Make, workers: int) -> None:
    def state() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002

    before = state()
    list(loader(make, workers=workers).from_cursor(0))
    list(EvaluationLoader(make()[0], PLAIN, batch_size=8, workers=workers))
    assert state() == before


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 2), (3, 0)])
def test_evaluation_sees_every_sample_once(make: Make, world_size: int, workers: int) -> None:
    images, _ = make()
    ids: list[int] = []
    for rank in range(world_size):
        batches = EvaluationLoader(
            images, PLAIN, batch_size=8, rank=rank, world_size=world_size, workers=workers
        )
        for batch in batches:
            assert 0 < len(batch.ids) == len(batch.images) == len(batch.labels) <= 8
            assert batch.labels.tolist() == [int(images.labels[i]) for i in batch.ids.tolist()]
            ids += batch.ids.tolist()
    assert sorted(ids) == list(range(COUNT))


def test_evaluation_of_fewer_images_than_processes() -> None:
    counts = [
        sum(
            len(batch.ids)
            for batch in EvaluationLoader(memory_images(2), PLAIN, batch_size=1, rank=r, world_size=3)
        )
        for r in range(3)
    ]
    assert counts == [1, 1, 0]


def test_evaluation_can_be_run_again() -> None:
    batches = EvaluationLoader(memory_images(COUNT), PLAIN, batch_size=8, workers=1)
    assert_same(batches, list(batches))


def broken(numbers: Iterable[int], count: int = COUNT) -> MemoryImages:
    """Return a dataset in which some images are unreadable."""
    images = memory_images(count)
    files = [b"no image" if i in set(numbers) else data for i, data in enumerate(images.files)]
    return MemoryImages(images.classes, images.labels, images.names, files)


def test_a_bad_image_costs_one_sample() -> None:
    images, order = broken({4, 9, 20}), FolderOrder(COUNT, BATCH, seed=1)
    good = list(TrainingLoader(memory_images(COUNT), order, RANDOM).from_cursor(0))
    found = list(TrainingLoader(images, order, RANDOM).from_cursor(0))
    for batch, other in zip(found, good, strict=True):
        same = torch.tensor([i not in (4, 9, 20) for i in batch.ids.tolist()])
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.images[same], other.images[same])
        assert all(
            not torch.equal(a, b) for a, b in zip(batch.images[~same], other.images[~same], strict=True)
        )
    asked = {i for batch in found for i in batch.ids.tolist()}
    bad = {entry for batch in found for entry in batch.bad}
    assert {entry.name for entry in bad} == {images.names[i] for i in asked & {4, 9, 20}}
    assert {entry.reason for entry in bad} == {"unreadable"}
    assert all(entry.sentence.startswith("it is not a known image format") for entry in bad)
    assert_same(TrainingLoader(images, order, RANDOM, workers=2).from_cursor(0), found)
    for step in range(STEPS):
        assert_same(TrainingLoader(images, order, RANDOM).from_cursor(step), found[step:])


def test_the_label_is_that_of_the_replacement() -> None:
    # The first pixel encodes the number of an image. Only one image of the first class is readable.
    images = broken(range(1, 10), 30)
    for batch in TrainingLoader(images, FolderOrder(30, 10, 0), _first_pixel).from_cursor(0):
        numbers = batch.images[:, 0].long().tolist()
        assert batch.labels.tolist() == [int(images.labels[number]) for number in numbers]
        assert numbers != batch.ids.tolist()


def _first_pixel(picture: Any) -> torch.Tensor:
    return torch.tensor(picture.getpixel((0, 0)))


@pytest.mark.parametrize("workers", [0, 1])
def test_it_gives_up_with_a_sentence(workers: int) -> None:
    images = broken(range(COUNT))
    batches = TrainingLoader(images, FolderOrder(COUNT, BATCH, 0), RANDOM, workers=workers).from_cursor(0)
    with pytest.raises(
        DataError, match=r"^./...[.]png cannot be read, and neither can 16 others that were tried"
    ) as caught:
        next(batches)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_cannot_be_had_stops_with_a_sentence(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.storage.remote.pauses_before", lambda retries: ())
    write_shards(memory_images(COUNT), tmp_path / "shards", shard_bytes=6_000)
    images = open_shards(tmp_path / "shards")
    for path in (tmp_path / "shards").glob("*.tar.json"):
        path.write_bytes(b"{}")
    order = ShardOrder(images.index.counts, BATCH, 0)
    with pytest.raises(DataError, match=r"^0....\.tar\.json is not the file that index\.json was made with"):
        next(TrainingLoader(images, order, RANDOM, workers=workers).from_cursor(0))


@pytest.mark.slow
def test_bad_images_in_shards(tmp_path: Path) -> None:
    write_shards(broken({4, 9}), tmp_path / "shards", shard_bytes=6_000)
    images = open_shards(tmp_path / "shards")
    lost = images.index.shards[2]
    with (tmp_path / "shards" / lost.name).open("r+b") as file:
        file.truncate(0)
    order = ShardOrder(images.index.counts, COUNT, 0)
    (batch,) = TrainingLoader(images, order, RANDOM).from_cursor(0)
    assert sorted(batch.ids.tolist()) == list(range(COUNT))
    start = sum(images.index.counts[:2])
    names = {images.name(i) for i in range(start, start + lost.samples)} | {"a/004.png", "a/009.png"}
    assert {bad.name for bad in batch.bad} == names
    assert {bad.sentence for bad in batch.bad if bad.reason == "truncated"} == {
        f"{lost.name} ends before it does"
    }


def test_a_replacement_is_of_the_same_shard_if_it_can_be(tmp_path: Path) -> None:
    write_shards(broken({4}), tmp_path / "shards", shard_bytes=9_000)
    images = open_shards(tmp_path / "shards")
    (bad,) = [i for i in range(COUNT) if images.name(i) == "a/004.png"]
    order = FolderOrder(COUNT, COUNT, 0)
    for cursor in range(8):
        (batch,) = TrainingLoader(images, order, _first_pixel).from_cursor(cursor)
        number = int(batch.images[batch.ids == bad][0, 0])
        (taken,) = [i for i in range(COUNT) if images.name(i).endswith(f"/{number:03d}.png")]
        assert taken in images.near(bad)


class Unreadable(MemoryImages):
    """A dataset in which one file cannot be opened."""

    def read(self, i: int) -> bytes:
        if i == 3:
            raise PermissionError(13, "Permission denied", self.names[i])
        return super().read(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_is_left_out_of_evaluation(workers: int) -> None:
    images = Unreadable(**vars(broken({4, 8, 9, 10, 11}, 14)))
    batches = list(EvaluationLoader(images, PLAIN, batch_size=4, workers=workers))
    assert [batch.ids.tolist() for batch in batches] == [[0, 1, 2], [5, 6, 7], [], [12, 13]]
    assert [len(batch.bad) for batch in batches] == [1, 1, 4, 0]
    assert [batch.images.shape for batch in batches] == [(n, 3, 16, 16) for n in (3, 3, 0, 2)]
    assert batches[0].bad[0] == ("a/003.png", "unreadable", "Permission denied")


def test_a_line_is_no_image() -> None:
    images = memory_images(2)
    files = [jpeg((0, 0, 0), (2, 400)), images.files[1]]
    images = MemoryImages(images.classes, images.labels, images.names, files)
    (batch,) = EvaluationLoader(images, PLAIN, batch_size=2)
    assert batch.ids.tolist() == [1]
    assert batch.bad[0][1:] == ("too large", "it is 2 by 400, a line")


@needs_sparrows
def test_photographs_from_a_folder_and_from_shards(tmp_path: Path) -> None:
    photographs = Subset(open_images(SPARROWS), np.arange(0, 600, 15))
    write_shards(photographs, tmp_path / "shards", shard_bytes=200_000)
    shards = open_shards(tmp_path / "shards")
    assert len(shards.index.shards) > 2
    by_name: list[dict[str, tuple[int, bytes]]] = []
    for images in (photographs, shards):
        found = {}
        for batch in EvaluationLoader(images, PLAIN, batch_size=16, workers=2):
            assert not batch.bad
            for i, label, x in zip(batch.ids.tolist(), batch.labels.tolist(), batch.images, strict=True):
                found[images.name(i)] = (label, x.numpy().tobytes())
        by_name.append(found)
    assert len(by_name[0]) == 40
    assert by_name[0] == by_name[1]


def test_memory_is_pinned_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_available in (False, True):
        monkeypatch.setattr("covpool.data.loader.pins_memory", lambda: is_available)  # noqa: B023  at once
        order = FolderOrder(COUNT, BATCH, 0)
        assert TrainingLoader(memory_images(COUNT), order, RANDOM)._loader.pin_memory is is_available


def test_mistakes() -> None:
    images, order = memory_images(COUNT), FolderOrder(COUNT, 2, 0)
    with pytest.raises(ValueError, match=r"^batch_size must be at least 3, the number of processes; got 2$"):
        TrainingLoader(images, order, RANDOM, world_size=3)
    with pytest.raises(ValueError, match=r"^cursor must be at least 0; got -1$"):
        TrainingLoader(images, order, RANDOM).from_cursor(-1)
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 1"):
        next(TrainingLoader(images, order, RANDOM, rank=2, world_size=2).from_cursor(0))
