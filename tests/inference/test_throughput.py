"""The cost of a job compared with a bare loop of decoder and network; the figure is printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from covpool.data.image_set import ImageSet
from covpool.data.sources import open_unlabeled
from covpool.data.transforms import Preprocessing, normalize_transform
from covpool.inference import Embed, Files, Running, infer
from covpool.inference.work import Decoder
from covpool.models import create_model, load_model, save_model
from tests.data.pictures import encode, photo
from tests.inference.small import write_folder

COUNT, BATCH, WORKERS, ROUNDS = 128, 16, 1, 5


class Decoded(Dataset[torch.Tensor]):
    def __init__(self, images: ImageSet, decoder: Decoder) -> None:
        self.images, self.decoder = images, decoder

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.decoder(self.images.read(i))


def bare_loop(bundle: Path, data: Path) -> None:
    """Run a loader and a network, and nothing else."""
    model = load_model(bundle).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    preprocessing = Preprocessing.of(model.pretrained_cfg)
    loader = DataLoader(Decoded(open_unlabeled(data), Decoder(preprocessing)), BATCH, num_workers=WORKERS)
    normalize = normalize_transform(preprocessing)
    with torch.inference_mode():
        for pixels in loader:
            images = normalize(pixels).contiguous(memory_format=torch.channels_last)
            model.forward_head(model.forward_features(images), pre_logits=True)


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


@pytest.mark.slow
def test_nine_tenths_of_a_bare_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = create_model("resnet18", dim=128, num_classes=10, image_size=224)
    bundle = save_model(model, tmp_path / "bundle")
    jpeg = encode(photo((500, 375)), "JPEG", quality=90)
    data = write_folder(tmp_path / "data", {f"{i:04d}.jpg": jpeg for i in range(COUNT)})
    running, files = Running(BATCH, WORKERS, "cpu"), Files("parquet", rows_per_file=64)
    ratios = []
    for k in range(ROUNDS):
        bare = seconds(lambda: bare_loop(bundle, data))
        ours = seconds(lambda k=k: infer(bundle, data, tmp_path / f"out{k}", Embed(), files, running))  # type: ignore[misc]
        ratios.append(bare / ours)
    with capsys.disabled():
        print(f"\nembed over a bare loop, images per second: {median(ratios):.3f}")
    assert median(ratios) >= 0.9
