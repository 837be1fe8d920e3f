"""What training needs beside the mathematics: a network, images, processes that load them, a disk."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from covpool.doctor.finding import NotHereError

WRITTEN = 8 * 2**20
# Seconds that a worker has to answer.
PATIENCE = 15


def training_step(device: str) -> str:
    """A step of a tiny network lowers the loss on its batch."""
    try:
        from covpool.models import create_model
    except ModuleNotFoundError as error:
        raise NotHereError(f"{error.name} is not installed", "pip install 'covpool[models]'") from error
    with torch.random.fork_rng():  # the caller's numbers go on as if nothing had been
        torch.manual_seed(0)
        model = create_model("test_resnet", dim=8, num_classes=2, image_size=64).to(device)
        images = torch.randn(4, 3, 64, 64).to(device)
    labels = torch.tensor([0, 1, 0, 1], device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0]:
        raise ArithmeticError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in two steps"


def image() -> str:
    """A JPEG is read as it was written."""
    try:
        from PIL import Image

        from covpool.data.decode import decode
    except ModuleNotFoundError as error:
        raise NotHereError(f"{error.name} is not installed", "pip install 'covpool[data]'") from error
    stream = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 100, 50)).save(stream, "JPEG", quality=95)
    seen = decode(stream.getvalue())
    pixel = seen.getpixel((30, 20))
    if seen.size != (64, 48) or not isinstance(pixel, tuple) or abs(pixel[0] - 200) > 8:
        raise ValueError(f"a JPEG of 64×48 became {seen.size} with a pixel {pixel}")
    return "a JPEG came through"


def workers() -> str:
    """A process that loads images can hand them over; it needs shared memory, and a temporary file."""
    images = TensorDataset(torch.ones(4, 2**18))
    # Without a limit a worker that cannot answer would be waited for without end.
    batch = next(iter(DataLoader(images, batch_size=4, num_workers=1, timeout=PATIENCE)))[0]
    return f"a batch of {batch.nbytes / 1e6:.0f} MB came from another process"


def disk() -> str:
    """A file reaches the disk."""
    with tempfile.TemporaryDirectory(prefix="covpool-") as folder:
        path = Path(folder) / "written"
        with path.open("wb") as file:
            file.write(bytes(WRITTEN))
            file.flush()
            os.fsync(file.fileno())
        if path.stat().st_size != WRITTEN:
            raise OSError(f"{path} is not as long as what was written")
    return f"{WRITTEN / 1e6:.0f} MB were written to {tempfile.gettempdir()}"
