"""Smoke test of the installed wheel with its extra `export`: a bundle as ONNX gives the same logits.

Everything runs in one process, which imports torch once. The smoke test of training runs the script.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image

import covpool
from covpool.cli.main import main

location = Path(covpool.__file__)
assert location.is_relative_to(sys.prefix), f"covpool was imported from {location}, not from the wheel"

with tempfile.TemporaryDirectory() as name:
    os.chdir(name)
    torch.manual_seed(0)
    chance = np.random.default_rng(0)
    for kind in ("coarse", "fine"):
        Path("images", kind).mkdir(parents=True)
        for i in range(6):
            side = 4 if kind == "coarse" else 64
            picture = Image.fromarray(chance.integers(256, size=(side, side, 3), dtype=np.uint8))
            picture.resize((64, 64)).save(Path("images", kind, f"{i}.png"))
    # An untrained model has nearly equal logits, so that a small difference would change the class.
    model = covpool.create_model("test_resnet", dim=8, num_classes=2, image_size=64).eval()
    covpool.save_model(model, "bundle", classes=["coarse", "fine"])

    words = ["images", "--out", "exported", "--formats", "onnx", "--rounds", "5"]
    assert main(["export", "bundle", *words]) == 0
    results = json.loads(Path("exported", "results.json").read_bytes())
    (file,) = results["files"]
    assert file["top1"] == 1, file
    assert not results["objections"], results["objections"]

    # Use the file without covpool, on pixels of the model's image size.
    session = onnxruntime.InferenceSession("exported/model.onnx")
    pixels = chance.integers(256, size=(3, 64, 64, 3), dtype=np.uint8)
    (logits,) = session.run(["logits"], {"images": pixels})
    of = covpool.load_model("bundle").eval()
    mean, std = (torch.tensor(of.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = of((torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std)
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)

print(f"covpool {covpool.__version__} with its extra export: the wheel works")
