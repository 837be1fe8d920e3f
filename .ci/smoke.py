"""Smoke test of the installed wheel. Run it with the Python of an environment with the wheel and torch."""

import sys
import warnings
from importlib import metadata, resources
from pathlib import Path

# numpy is not a requirement, so torch's warning that it is missing is expected.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch  # noqa: E402  torch warns while it is imported

loaded_by_torch = set(sys.modules)

import covpool  # noqa: E402  after torch, to separate their imports
from covpool import functional, nn  # noqa: E402, F401  packages are imported when they are first used

foreign = {name.partition(".")[0] for name in set(sys.modules) - loaded_by_torch}
foreign -= {"covpool", "torch", *sys.stdlib_module_names}
assert not foreign, f"import covpool also imported {sorted(foreign)}"

location = Path(covpool.__file__)
assert location.is_relative_to(sys.prefix), f"covpool was imported from {location}, not from the wheel"
installed = metadata.version("covpool")
assert covpool.__version__ == installed, f"{covpool.__version__} is not {installed}"
assert resources.files(covpool).joinpath("py.typed").is_file(), "the wheel has no py.typed"

# After 20 steps the iteration has converged: the square of the root is the covariance.
torch.manual_seed(0)
x = torch.randn(3, 4, 9, dtype=torch.float64, requires_grad=True)
root = covpool.functional.isqrt_cov(x, iteration="paper", steps=20)
torch.testing.assert_close(root @ root, torch.stack([row.cov(correction=0) for row in x]))
assert torch.autograd.gradcheck(covpool.functional.isqrt_cov, x)

layer = covpool.nn.CovPool(8, dim=4)
maps = torch.randn(2, 8, 5, 5, requires_grad=True)
vectors = layer(maps)
assert vectors.shape == (2, layer.out_features) == (2, 10), vectors.shape
vectors.square().sum().backward()
for name, parameter in [("input", maps), *layer.named_parameters()]:
    gradient = parameter.grad
    assert gradient is not None, f"{name} has no gradient"
    assert gradient.isfinite().all(), f"the gradient of {name} is not finite"

print(f"covpool {covpool.__version__} on torch {torch.__version__}: the wheel works")
