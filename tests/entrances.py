"""Readers of untrusted files: valid samples, mutations, and the covpool function that reads each format."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from covpool.errors import CovpoolError
from tests.data.pictures import encode, photo

Files = dict[str, bytes]


class Entrance(NamedTuple):
    """Functions that make valid samples, mutate one sample, and read its files as covpool does.

    Attributes:
        samples: returns valid samples.
        mutate: changes one of them.
        read: reads the files of a folder.
        read_url: reads the files of a folder on a server; ``None`` if covpool does not.
    """

    samples: Callable[[], list[Files]]
    mutate: Callable[[Files, random.Random], Files]
    read: Callable[[Path], object]
    read_url: Callable[[str], object] | None = None


# Mutations.

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF)
WORDS = (
    "../../outside.jpg", "/etc/passwd", "\0", "\x1b[2J", "", " ", "nan", "inf", "-1", "1e999", "9" * 5000,
    "x" * 70_000, "\ud800", "\u202e", "&a", "*a", "!!python/object/apply:os.mkdir [ran]", "{", "[" * 999, "]",
    "'", '"', "\n", "\r", ",", ";", "\t", ":", "null", "true", "1:2:3:4:5", "2001-01-01", "<<", "%TAG",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**16, 2**31, 2**63, 10**400, 0.5, 1e-300, 1e308, "", "x", "../x",
    "/etc/passwd", "\0", "\x1b[2J", "hf-hub:a/b", [], [[]], {}, {"a": {}}, [0] * 1000, "auto", "isqrt_cov",
    "resnet50", 3, 224, [3, 224, 224],
)  # fmt: skip


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Change some bytes: flip a bit, write random or extreme values, delete, repeat or truncate."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        place, length = chance.randrange(len(changed) + 1), chance.choice((1, 2, 4, 8, 64, 1024))
        match chance.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                changed[place : place + length] = chance.randbytes(length)
            case 2:
                width, order = chance.choice((1, 2, 4, 8)), chance.choice(("big", "little"))
                number = chance.choice(NUMBERS) & (256**width - 1)
                changed[place : place + width] = number.to_bytes(width, order)
            case 3:
                del changed[place : place + length]
            case 4:
                changed[place:place] = changed[place : place + length] * chance.choice((1, 2, 50))
            case _ if chance.random() < 0.3:
                del changed[place:]
    return bytes(changed)


def mutate_text(data: bytes, chance: random.Random) -> bytes:
    """Insert or replace words, or change bytes."""
    if chance.random() < 0.3:
        return mutate_bytes(data, chance)
    parts = data.decode().split(chance.choice((" ", "\n", ",", ":")))
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(parts))
        word = chance.choice(WORDS)
        parts[place] = chance.choice((word, parts[place] + word, word + parts[place]))
    return chance.choice((" ", "\n", ",", ": ")).join(parts).encode("utf-8", "surrogatepass")


def mutate_json(value: Any, chance: random.Random) -> Any:
    """Replace, remove or add values at random positions in the JSON value."""
    places: list[tuple[Any, Any]] = []
    found = [value]
    while found:
        inner = found.pop()
        keys = (
            list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        )
        places += [(inner, key) for key in keys]
        found += [inner[key] for key in keys]
    for parent, key in chance.sample(places, min(len(places), chance.choice((1, 1, 2, 4)))):
        match chance.randrange(4):
            case 0 if isinstance(parent, dict):
                parent.pop(key, None)
            case 1 if isinstance(parent, dict):
                parent[str(chance.choice(WORDS))[:100]] = chance.choice(VALUES)
            case _ if isinstance(parent, dict) or key < len(parent):
                parent[key] = chance.choice(VALUES)
    return value


def one_file(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Files, random.Random], Files]:
    """Return a function that mutates one of the files."""

    def mutate(files: Files, chance: random.Random) -> Files:
        name = chance.choice(sorted(files))
        return {**files, name: change(files[name], chance)}

    return mutate


# Entrances. Each one reads its files as the command does.


def pictures() -> list[Files]:
    formats = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
    found = [{"image": encode(photo((31, 23)), image_format)} for image_format in formats]
    found += [
        {"image": encode(photo((31, 23)).convert(mode), name)}
        for mode, name in (("P", "PNG"), ("CMYK", "JPEG"))
    ]
    return [
        *found,
        {"image": encode(photo((31, 23)), "JPEG", progressive=True, exif=b"Exif\0\0MM\0*\0\0\0\x08")},
    ]


def read_picture(folder: Path) -> None:
    from covpool.data.decode import decode
    from covpool.data.transforms import Preprocessing, evaluation_transform
    from covpool.storage.address import read_image

    evaluation_transform(Preprocessing(size=64))(decode(read_image(str(folder / "image"))))


def read_all(images: Any) -> None:
    from covpool.data.decode import decode

    for i in range(min(len(images), 20)):
        try:
            images.name(i).encode("utf-8", "surrogateescape")
            images.label(i)
            decode(images.read(i))
        except (CovpoolError, OSError):
            pass  # one row, which reports the error


def open_both(path: Path | str) -> None:
    """Open the images as ``train`` does, and as ``predict`` does."""
    from covpool.data.sources import open_splits, open_unlabeled

    for images in (lambda: list(open_splits(path).values()), lambda: [open_unlabeled(path)]):
        try:
            for one in images():
                read_all(one)
                one.fingerprint()
                one.stamp()
        except (CovpoolError, OSError):
            pass


def names() -> list[Files]:
    return [{"wren.jpg": encode(photo((9, 9)), "JPEG"), "jay.jpg": encode(photo((9, 9)), "JPEG")}]


def mutate_names(files: Files, chance: random.Random) -> Files:
    made = {}
    for name, data in files.items():
        for _ in range(3):
            word = mutate_text(name.encode(), chance).replace(b"\0", b"").replace(b"/", b"_")[:250]
            made[os.fsdecode(word) if word not in (b"", b".", b"..") else name] = data
    return made


def read_names(folder: Path) -> None:
    from covpool.training.run_folder import csv_bytes

    for number, split in enumerate(("train", "val")):
        place = folder / "tree" / split / "bird"
        place.mkdir(parents=True)
        (folder / "tree" / split / "other").mkdir()
        for file in folder.iterdir():
            if file.is_file():
                (place / file.name).symlink_to(file)
                (folder / "tree" / split / "other" / f"{number}.jpg").unlink(missing_ok=True)
                (folder / "tree" / split / "other" / f"{number}.jpg").symlink_to(file)
    open_both(folder / "tree")
    csv_bytes(["name"], [[file.name] for file in folder.iterdir()])


def tables() -> list[Files]:
    image = encode(photo((9, 9)), "JPEG")
    plain = "path,label,split\n" + "".join(f"{i}.jpg,{'ab'[i % 2]},train\n" for i in range(4))
    files = {f"{i}.jpg": image for i in range(4)}
    return [{"rows.csv": plain.encode(), **files}, {"rows.csv": plain.replace(",", "\t").encode(), **files}]


def mutate_table(files: Files, chance: random.Random) -> Files:
    return {**files, "rows.csv": mutate_text(files["rows.csv"], chance)}


def tars() -> list[Files]:
    made = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
            for name in ("a/1.jpg", "é" * 40 + ".png", "notes.txt"):
                data = encode(photo((9, 9)), "PNG" if name.endswith("png") else "JPEG")
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        made.append({"a.tar": stream.getvalue()})
    return made


def shards() -> list[Files]:
    from covpool.data.shards.write import write_shards
    from tests.data.memory_images import memory_images

    with tempfile.TemporaryDirectory() as folder:
        write_shards(memory_images(6), Path(folder, "shards"), shard_bytes=2000, seed=0)
        return [{file.name: file.read_bytes() for file in Path(folder, "shards").iterdir()}]


def mutate_shards(files: Files, chance: random.Random) -> Files:
    if chance.random() < 0.5:
        fields = mutate_json(json.loads(files["index.json"]), chance)
        return {**files, "index.json": json.dumps(fields).encode()}
    return one_file(mutate_bytes)(files, chance)


def parquets() -> list[Files]:
    from tests.data.memory_images import memory_images
    from tests.data.parquet_files import write_parquet

    with tempfile.TemporaryDirectory() as folder:
        made = [write_parquet(memory_images(6), Path(folder, f"{t}.parquet"), texts=t) for t in (False, True)]
        return [{"train-0.parquet": path.read_bytes()} for path in made]


@functools.cache
def bundle() -> Files:
    from covpool.models.saving import save_model
    from tests.models.bundles.samples import CLASSES, trained

    with tempfile.TemporaryDirectory() as folder:
        save_model(trained(), Path(folder, "bundle"), classes=CLASSES)
        return {file.name: file.read_bytes() for file in Path(folder, "bundle").iterdir()}


def mutate_bundle(files: Files, chance: random.Random) -> Files:
    """Damage the bundle, or tamper with it and recompute the hashes."""
    from covpool.models.card import card_hash

    kind = chance.randrange(4)
    if kind == 0:
        return one_file(mutate_bytes)(files, chance)
    card, weights = json.loads(files["covpool.json"]), files["model.safetensors"]
    if kind == 1:  # most bytes are tensor data; the header matters
        weights = mutate_bytes(weights[:3000], chance) + weights[3000:]
        if isinstance(card.get("weights"), dict):
            card["weights"] |= {"sha256": hashlib.sha256(weights).hexdigest(), "bytes": len(weights)}
    else:
        mutate_json(card, chance)
    card["hash"] = card_hash(card)
    return {"covpool.json": json.dumps(card).encode(), "model.safetensors": weights}


def read_bundle(folder: Path) -> None:
    from covpool.models.bundle import load_model

    model = load_model(folder)
    if model.num_classes:
        model.predict(photo((31, 23)), top=1)


def checkpoints() -> list[Files]:
    from covpool.training.checkpoint import write_checkpoint
    from tests.training.test_checkpoint import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        return [
            {file.name: file.read_bytes() for file in write_checkpoint(Path(folder), checkpoint(7)).iterdir()}
        ]


def mutate_checkpoint(files: Files, chance: random.Random) -> Files:
    if chance.random() < 0.4:
        return one_file(mutate_bytes)(files, chance)
    inner = {name: data for name, data in files.items() if name != "manifest.json"}
    if chance.random() < 0.5:
        inner["state.json"] = json.dumps(mutate_json(json.loads(inner["state.json"]), chance)).encode()
    else:
        inner = one_file(mutate_bytes)(inner, chance)
    return with_manifest(inner, json.loads(files["manifest.json"])["about"], chance)


def with_manifest(files: Files, about: Any, chance: random.Random) -> Files:
    """Add a manifest that fits the files, and sometimes change it too."""
    from covpool.storage.manifest import Manifest, part_of

    manifest = Manifest({name: part_of(data) for name, data in files.items()}, about).written()
    if chance.random() < 0.3:
        fields = mutate_json(json.loads(manifest), chance)
        manifest = json.dumps(fields, sort_keys=True).encode() + b"\n"
    return {**files, "manifest.json": manifest}


def read_run_checkpoint(folder: Path) -> None:
    from covpool.training.checkpoint import read_checkpoint

    _ = read_checkpoint(folder).progress


@functools.cache
def sums() -> tuple[Files, ...]:
    import torch

    from covpool.closed_form.kept import save_sums
    from covpool.closed_form.sums import Rows, Sums

    about = {"head": "gap", "balance": False, "batch_size": 32, "compile": False}
    torch.manual_seed(0)
    found = []
    for most in (1 << 20, 0):
        made = Sums("x", ("jay", "wren"), 3, max_rows_bytes=most)
        made.add(Rows(torch.randn(12, 3), torch.arange(12) % 2, torch.arange(12)))
        with tempfile.TemporaryDirectory() as folder:
            save_sums(Path(folder, "sums"), made, about)
            found.append({file.name: file.read_bytes() for file in Path(folder, "sums").iterdir()})
    return tuple(found)


def mutate_sums(files: Files, chance: random.Random) -> Files:
    """Damage the sums, or tamper with them and recompute the hashes."""
    if chance.random() < 0.3:
        return one_file(mutate_bytes)(files, chance)
    about, name = json.loads(files["manifest.json"])["about"], "sums.safetensors"
    inner = {name: mutate_bytes(files[name], chance) if chance.random() < 0.7 else files[name]}
    return with_manifest(inner, mutate_json(about, chance) if chance.random() < 0.5 else about, chance)


def read_sums(folder: Path) -> None:
    from covpool.closed_form.kept import load_sums
    from covpool.closed_form.solve import solve

    read, about = load_sums(folder)
    more = read + read
    solve(more.with_classes((*more.classes, "robin")), balance=about["balance"])


def weights() -> list[Files]:
    import safetensors.torch
    import torch

    tensors = {"conv.weight": torch.ones(3, 4), "fc.bias": torch.zeros(5)}
    new, old = io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": tensors, "epoch": 3}, new)
    torch.save(tensors, old, _use_new_zipfile_serialization=False)
    return [
        {"w.pth": new.getvalue()},
        {"w.pth": old.getvalue()},
        {"w.safetensors": safetensors.torch.save(tensors)},
    ]


def read_weights(folder: Path) -> None:
    from covpool.models.weights import read_state_dict

    for file in folder.iterdir():
        read_state_dict(file)


def recipes() -> list[Files]:
    from covpool.training.recipe import Recipe
    from covpool.training.recipe_files import recipe_text

    return [
        {"recipe.yaml": recipe_text(Recipe()).encode()},
        {"recipe.yaml": b"schedule: {epochs: 3}\nseed: 1\n"},
    ]


def read_recipe_file(folder: Path) -> None:
    from covpool.training.recipe_files import read_recipe, recipe_text

    recipe_text(read_recipe(folder / "recipe.yaml"))


def exported() -> list[Files]:
    import onnx

    metadata = {"covpool": '"0.1.0"', "classes": '["jay", "wren"]', "preprocessing": '{"size": 64}'}
    value = onnx.helper.make_tensor_value_info("x", 1, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [value], [value])
    model = onnx.helper.make_model(graph)
    onnx.helper.set_model_props(model, metadata)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in metadata.items():
            archive.writestr(f"model/extra/{name}", text)
    return [{"model.onnx": model.SerializeToString()}, {"model.pt2": stream.getvalue()}]


def read_exported(folder: Path) -> None:
    from covpool.export.targets import read_metadata

    for file in folder.iterdir():
        read_metadata(file)


def run_folders() -> list[Files]:
    log = b'{"step": 1, "loss": 2.0}\n{"event": "resumed", "step": 2}\n'
    bad = b"name,reason,sentence\na.jpg,truncated,its end is missing\n"
    summary = {"finished": True, "fingerprints": {"train": "x"}, "epochs": 2, "metrics": None, "split": None}
    return [{"log.jsonl": log, "bad_images.csv": bad, "summary.json": json.dumps(summary).encode()}]


def read_run_folder(folder: Path) -> None:
    from covpool.training.run_folder import RunFolder

    run = RunFolder(folder)
    run.read_summary()
    run.read_bad_images()
    run.cut_log(1)


ENTRANCES: dict[str, Entrance] = {
    "images": Entrance(pictures, one_file(mutate_bytes), read_picture),
    "names": Entrance(names, mutate_names, read_names),
    "rows": Entrance(
        tables,
        mutate_table,
        lambda folder: open_both(folder / "rows.csv"),
        lambda url: open_both(f"{url}/rows.csv"),
    ),
    "tars": Entrance(tars, one_file(mutate_bytes), open_both, open_both),
    "shards": Entrance(shards, mutate_shards, open_both, open_both),
    "parquet": Entrance(
        parquets, one_file(mutate_bytes), open_both, lambda url: open_both(f"{url}/train-0.parquet")
    ),
    "bundles": Entrance(lambda: [bundle()], mutate_bundle, read_bundle),
    "checkpoints": Entrance(checkpoints, mutate_checkpoint, read_run_checkpoint),
    "sums": Entrance(lambda: list(sums()), mutate_sums, read_sums),
    "weights": Entrance(weights, one_file(mutate_bytes), read_weights),
    "recipes": Entrance(recipes, one_file(mutate_text), read_recipe_file),
    "exported": Entrance(exported, one_file(mutate_bytes), read_exported),
    "run folders": Entrance(run_folders, one_file(mutate_text), read_run_folder),
}
