from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.pictures import TINY10


@pytest.fixture(scope="session")
def tiny_imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny-imagenet-200"
    write_tiny_imagenet(folder)
    return folder


def write_tiny_imagenet(folder: Path) -> None:
    """Link tiny10 into the folder layout of Tiny-ImageNet."""
    if not TINY10.is_dir():
        pytest.skip("tiny10 is not next to the project")
    (folder / "val" / "images").mkdir(parents=True)
    classes = sorted(path.name for path in (TINY10 / "train").iterdir())
    lines = []
    for name in classes:
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for image in sorted((TINY10 / "train" / name).iterdir())[:40]:
            (images / image.name).symlink_to(image)
        for image in sorted((TINY10 / "val" / name).iterdir())[:20]:
            (folder / "val" / "images" / f"{name}_{image.name}").symlink_to(image)
            lines.append(f"{name}_{image.name}\t{name}\t0\t0\t63\t63")
    (folder / "wnids.txt").write_text("\n".join(classes))
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines))
