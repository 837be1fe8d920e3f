"""The checks of the doctor: packages, devices, disks, and the mathematics."""

from __future__ import annotations

import io
import os
import platform
import re
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from covpool import __version__
from covpool.errors import UsageError
from covpool.functional import covariance, isqrt_cov


@dataclass(frozen=True)
class Finding:
    """What one test found.

    Attributes:
        name: what was tested.
        state: ``skip`` where a package that it needs is not there, or the machine lacks what nothing needs.
        told: a figure, or what went wrong.
        remedy: what to do about it, where something went wrong or is missing.
    """

    name: str
    state: Literal["pass", "fail", "skip"]
    told: str
    remedy: str = ""


class NotHereError(Exception):
    """What a test needs is not on this machine, and covpool does without it.

    Args:
        told: what is not here.
        remedy: how to get it.
    """

    def __init__(self, told: str, remedy: str) -> None:
        super().__init__(told)
        self.remedy = remedy


# Beside Python and covpool itself, those whose versions explain most of what people report.
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "pyarrow",
    "scikit-learn",
    "onnxruntime",
    "ray",
)
# They are for those who work on covpool, or nothing but the others together.
NOT_FOR_USERS = ("all", "dev")


def versions() -> dict[str, str]:
    """Of Python, covpool, and the packages that are there."""
    found = {"python": platform.python_version(), "covpool": __version__}
    return found | {name: version for name in PACKAGES if (version := _version(name)) is not None}


def missing_by_extra() -> dict[str, tuple[str, ...]]:
    """Of every extra, the packages that are not there; empty where covpool is on the path alone."""
    return {
        extra: tuple(sorted(name for name in names if _version(name) is None))
        for extra, names in sorted(_needed_by_extra().items())
        if extra not in NOT_FOR_USERS
    }


def _needed_by_extra() -> dict[str, set[str]]:
    """The packages of every extra, as the metadata have them: those of extras that it brings among them."""
    try:
        requirements = metadata.requires("covpool") or []
    except metadata.PackageNotFoundError:
        return {}
    needed: dict[str, set[str]] = {}
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == .([\w-]+)", requirement)
        if name is not None and extra is not None:
            needed.setdefault(extra[1], set()).add(name[0])
    return needed


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# Relative, of the value in float64 and in float32; eigh and the iteration agree to their rounding.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
# So many that the iteration has come to its end.
STEPS = 30
# Of the products that are timed, and how often: large enough that a GPU multiplies more than it waits.
SIDE, ROUNDS = {"cpu": 384, "cuda": 4096}, 5


def value(device: str) -> str:
    """``isqrt_cov`` is the square root that eigenvalues give."""
    x = _features().to(device)
    expected = _root_by_eigenvalues(covariance(x))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 is a choice, no fault
    try:
        errors = [_error(x, expected, dtype, limit) for dtype, limit in LIMITS.items()]
    finally:
        torch.set_float32_matmul_precision(before)
    return f"{errors[0]:.0e} from eigh in float64, {errors[1]:.0e} in float32"


def gradient(device: str) -> str:
    """Its gradient is that of finite differences."""
    x = _features()[:1, :3, :5].to(device).requires_grad_()
    torch.autograd.gradcheck(isqrt_cov, (x,))
    return "as finite differences have it"


def compiled(device: str) -> str:
    """torch.compile makes a kernel; it needs a C++ compiler, or a GPU's."""
    from torch._inductor import config

    x = torch.ones(8, device=device)
    made = torch.compile(lambda y: (y + 1).sqrt() * 2)
    # An earlier answer would hide that the compiler is gone; torch warns that it looks for none.
    with config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = made(x)
    if not torch.allclose(found, (x + 1).sqrt() * 2):
        raise ArithmeticError("what it compiles gives another result")
    return "it works"


def half_precision(device: str) -> str:
    """How long products take in bfloat16, beside float32."""
    ratio = _seconds(device, torch.bfloat16) / _seconds(device, torch.float32)
    advice = "--precision bfloat16 is worth trying" if ratio < 0.8 else "float32 is the one to take"
    return f"products in bfloat16 take {ratio:.2f} of the time of float32: {advice}"


def _error(x: Tensor, expected: Tensor, dtype: torch.dtype, limit: float) -> float:
    found = isqrt_cov(x.to(dtype), steps=STEPS).double()
    error = float((found - expected).norm() / expected.norm())
    if not error < limit:
        raise ArithmeticError(f"{error:.1e} from eigh in {str(dtype).removeprefix('torch.')}")
    return error


def _features() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 12, 49, dtype=torch.float64, generator=generator)


def _root_by_eigenvalues(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def _seconds(device: str, dtype: torch.dtype) -> float:
    """Of a product, the least of several."""
    side = SIDE[device]
    a = torch.ones(8, side, side, dtype=dtype, device=device)
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        (a @ a).sum().item()  # which waits for a GPU
        taken.append(time.perf_counter() - began)
    return min(taken)


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
        raise UsageError(f"a JPEG of 64×48 became {seen.size} with a pixel {pixel}")
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
