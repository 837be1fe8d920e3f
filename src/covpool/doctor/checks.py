"""The checks of ``covpool doctor``: packages, devices, disk and numerics."""

from __future__ import annotations

import io
import platform
import re
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from covpool import __version__
from covpool.device import has_float64
from covpool.errors import UsageError
from covpool.functional import covariance, isqrt_cov
from covpool.storage.files import write_file
from covpool.storage.folders import scratch_folder


@dataclass(frozen=True)
class Finding:
    """The result of one test.

    Attributes:
        name: name of the test.
        state: ``skip`` if a package is missing, or the machine lacks an optional feature.
        detail: a figure, or the error.
        remedy: what to do about a failure or a missing package.
    """

    name: str
    state: Literal["pass", "fail", "skip"]
    detail: str
    remedy: str = ""


class NotHereError(Exception):
    """An optional package is missing.

    Args:
        detail: which one.
        remedy: how to install it.
    """

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


# Packages whose versions explain most bug reports.
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
# Extras for developers of covpool, and the union of the others.
NOT_FOR_USERS = ("all", "dev")


def versions() -> dict[str, str]:
    """Return the versions of Python, covpool and the installed packages."""
    installed = {"python": platform.python_version(), "covpool": __version__}
    return installed | {name: version for name in PACKAGES if (version := _version(name)) is not None}


def missing_by_extra() -> dict[str, tuple[str, ...]]:
    """Return the missing packages of each extra; empty if covpool itself is not installed."""
    return {
        extra: tuple(sorted(name for name in names if _version(name) is None))
        for extra, names in sorted(_needed_by_extra().items())
        if extra not in NOT_FOR_USERS
    }


def _needed_by_extra() -> dict[str, set[str]]:
    """Return the packages of each extra, from the metadata of covpool."""
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


# Largest relative difference of isqrt_cov from eigh.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
# Enough steps for the iteration to converge.
STEPS = 15
# Size and number of the timed products: large enough to keep a GPU busy.
SIDE, GPU_SIDE, ROUNDS = 384, 4096, 5


def value(device: str) -> str:
    """Compare ``isqrt_cov`` with the square root by eigendecomposition."""
    x = _features()
    expected = _root_by_eigenvalues(covariance(x))
    dtypes = [*LIMITS] if has_float64(torch.device(device)) else [torch.float32]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 is a setting, not a fault
    try:
        errors = {_name(dtype): _error(x, device, expected, dtype) for dtype in dtypes}
    finally:
        torch.set_float32_matmul_precision(before)
    detail = " and ".join(f"by {error:.0e} in {name}" for name, error in errors.items())
    return f"differs from eigh {detail}"


def gradient(device: str) -> str:
    """Compare the gradient of ``isqrt_cov`` with finite differences."""
    x = _features()[:1, :3, :5]
    if not has_float64(torch.device(device)):
        return _gradient_like_the_cpu(x.float(), device)
    torch.autograd.gradcheck(isqrt_cov, (x.to(device).requires_grad_(),))
    return "matches finite differences"


def _gradient_like_the_cpu(x: Tensor, device: str) -> str:
    """Compare gradients in float32, whose finite differences have too few digits."""
    grads = []
    for place in ("cpu", device):
        leaf = x.to(place).requires_grad_()
        isqrt_cov(leaf).square().sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.cpu())
    error = float((grads[1] - grads[0]).norm() / grads[0].norm())
    if not error < LIMITS[torch.float32]:
        raise ArithmeticError(f"differs by {error:.1e} from the gradient of the CPU")
    return f"differs by {error:.0e} from the gradient of the CPU (no float64 here)"


def compiled(device: str) -> str:
    """Compile a kernel with torch.compile, which needs a C++ or GPU compiler."""
    from torch._inductor import config

    x = torch.ones(8, device=device)
    compute = torch.compile(lambda y: (y + 1).sqrt() * 2)
    # A cached kernel would hide a missing compiler; torch warns that its caches are off.
    with config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compute(x)
    if not torch.allclose(result, (x + 1).sqrt() * 2):
        raise ArithmeticError("the compiled kernel gives a wrong result")
    return "works"


def half_precision(device: str) -> str:
    """Time matrix products in bfloat16 and float32."""
    ratio = _seconds(device, torch.bfloat16) / _seconds(device, torch.float32)
    advice = "try --precision bfloat16" if ratio < 0.8 else "use float32"
    return f"matrix products in bfloat16 take {ratio:.2f} of the time in float32: {advice}"


def _error(x: Tensor, device: str, expected: Tensor, dtype: torch.dtype) -> float:
    root = isqrt_cov(x.to(dtype).to(device), iteration="paper", steps=STEPS).cpu().double()
    error = float((root - expected).norm() / expected.norm())
    if not error < LIMITS[dtype]:
        raise ArithmeticError(f"differs by {error:.1e} from eigh in {_name(dtype)}")
    return error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _features() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 12, 49, dtype=torch.float64, generator=generator)


def _root_by_eigenvalues(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def _seconds(device: str, dtype: torch.dtype) -> float:
    """Return the shortest time of several products."""
    side = SIDE if device == "cpu" else GPU_SIDE
    a = torch.ones(8, side, side, dtype=dtype, device=device)
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        (a @ a).sum().item()  # waits for the GPU
        taken.append(time.perf_counter() - began)
    return min(taken)


WRITTEN = 8 * 2**20
# Timeout of a worker, in seconds.
PATIENCE = 15


def training_step(device: str) -> str:
    """Train a tiny network for two steps, which must lower its loss."""
    try:
        import timm  # noqa: F401  # before covpool.models, so that the report names timm first

        from covpool.models import create_model
    except ModuleNotFoundError as error:
        raise NotHereError(f"{error.name} is not installed", "pip install 'covpool[models]'") from error
    with torch.random.fork_rng():  # keeps the caller's random state
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
        raise ArithmeticError(f"the loss rose from {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in two steps"


def image() -> str:
    """Write and decode a JPEG."""
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
        raise UsageError(f"a JPEG of 64×48 pixels was decoded as {seen.size} with a pixel {pixel}")
    return "JPEG decoding works"


def workers() -> str:
    """Load a batch in a worker process, which needs shared memory and a temporary file."""
    images = TensorDataset(torch.ones(4, 2**18))
    # Without a timeout, a worker that hangs would block forever.
    batch = next(iter(DataLoader(images, batch_size=4, num_workers=1, timeout=PATIENCE)))[0]
    return f"a worker process delivered {batch.nbytes / 1e6:.0f} MB"


def disk() -> str:
    """Write a file to the disk."""
    with scratch_folder() as folder:
        path = folder / "written"
        write_file(path, bytes(WRITTEN))
        if path.stat().st_size != WRITTEN:
            raise OSError(f"{path} is shorter than the data written")
    return f"wrote {WRITTEN / 1e6:.0f} MB to {folder.parent}"
