"""Smoke test of the installed wheel with its extra `models`: save and load a network, print help."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import covpool

location = Path(covpool.__file__)
assert location.is_relative_to(sys.prefix), f"covpool was imported from {location}, not from the wheel"

torch.manual_seed(0)
model = covpool.create_model("resnet18", dim=32, num_classes=5).eval()
images = torch.randn(2, 3, 64, 64)
with torch.no_grad():
    logits = model(images)
assert logits.shape == (2, 5), logits.shape
assert logits.isfinite().all(), logits

with tempfile.TemporaryDirectory() as folder:
    covpool.save_model(model, folder)
    loaded = covpool.load_model(folder).eval()
with torch.no_grad():
    assert torch.equal(loaded(images), logits), "the loaded model gives other logits than the saved one"

script = Path(sys.executable).with_name("covpool")
for command in ([sys.executable, "-I", "-m", "covpool", "plan", "--help"], [script, "--help"]):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)

print(f"covpool {covpool.__version__} with its extra models: the wheel works")
