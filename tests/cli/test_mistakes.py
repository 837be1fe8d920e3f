"""Common mistakes of users: each gives a one-line error message, never a traceback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from covpool.cli.main import main
from covpool.data.image_set import ImageFiles
from covpool.models import create_model, save_model
from covpool.training.recipe_files import read_recipe, write_recipe
from tests.data.pictures import encode, photo
from tests.data.trees import plant, write

SPECIES = ("jay", "tit", "wren")
FEW = "--model test_resnet --image-size 64 --batch-size 4 --epochs 1 --workers 0"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of three birds, the bundle of a run, and files mistaken for these."""
    place = tmp_path_factory.mktemp("mistakes")
    picture = encode(photo((48, 40)), "JPEG")
    for split, bird, number in ((s, b, n) for s in ("train", "test") for b in SPECIES for n in range(4)):
        write(place / f"birds/{split}/{bird}/{number}.jpg", picture)
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=3, image_size=64)
    bundle = save_model(model, place / "runs/birds/bundle", classes=SPECIES)
    save_model(create_model("test_resnet", dim=8, num_classes=5, image_size=64), place / "five")
    shutil.copytree(bundle, place / "damaged")
    os.truncate(place / "damaged/model.safetensors", 20_000)
    (place / "empty").mkdir()
    plant(place / "alone", *(f"jay/{number}.jpg" for number in range(12)))
    plant(place / "others", *(f"{split}/jay/1.jpg" for split in ("train", "test")), "test/owl/1.jpg")
    plant(place / "strangers", *(f"{split}/{bird}/1.jpg" for split in ("train", "test") for bird in "ab"))
    for number in range(20):
        write(place / f"torn/{'ab'[number % 2]}/{number}.jpg", picture[:300])
    torch.save({"weights": torch.ones(3)}, place / "model.pt")
    (place / "latin.txt").write_bytes("Zaunkönig\n".encode("latin-1"))
    (place / "wrong_key.yaml").write_text("optimizer: {learning_rate: 0.1}\n", "utf-8")
    (place / "near_key.yaml").write_text("schedule: {epoch: 3}\n", "utf-8")
    (place / "wrong_value.yaml").write_text("schedule: {epochs: many}\n", "utf-8")
    return place


def complaint(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message: the last line that the failing command prints."""
    verb = command.split()[0]
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert not captured.out
    *_, last = captured.err.splitlines()
    assert "Traceback" not in captured.err
    return last.removeprefix(f"covpool {verb}: ")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train --data brids", "brids: No such file or directory: did you mean birds?"),
        ("check nowhere", "nowhere: No such file or directory"),
        (
            "train --data empty",
            "empty has no folders of classes: put the images of each class into a folder with its name, or "
            "list them in a CSV of path,label",
        ),
        (
            f"train --data alone {FEW}",
            "alone has only one class, 'jay': put the images of each class into a folder with the name of "
            "the class",
        ),
        (
            "train --data model.pt",
            "model.pt is neither a folder nor a CSV: give a folder of classes, or a CSV of path,label",
        ),
        (
            "eval model.pt birds",
            "bundle 'model.pt': this is a file, not a folder: pass the folder bundle of a run",
        ),
        (
            "eval empty birds",
            "bundle 'empty': there is no covpool.json in it: pass the folder bundle of a run",
        ),
        (
            "predict runs/birds birds",
            "bundle 'runs/birds': there is no covpool.json in it: did you mean runs/birds/bundle?",
        ),
        (
            "eval runs/bundle birds",
            "bundle 'runs/bundle': there is no such folder: did you mean runs/birds/bundle?",
        ),
        ("convert model.pt there", "model.pt is not a fast-MPN-COV checkpoint: its first tensor is weights"),
        ("train --data birds --epoch 3", "unrecognized arguments: --epoch 3: did you mean --epochs?"),
        ("train --data birds --epochs x", "--epochs takes a whole number; got x"),
        ("train birds --epochs -3", "--epochs must be at least 1; got -3"),
        ("train birds --image-size=-5", "--image-size must be at least 1; got -5"),
        ("train birds --val-fraction 20", "--val-fraction must be from 0 to below 1; got 20.0"),
        ("lr-find birds --epochs -3", "--epochs must be at least 1; got -3"),
        ("lr-find birds --image-size -5", "--image-size must be at least 1; got -5"),
        ("lr-find birds --steps 3", "--steps must be at least 20; got 3"),
        ("svm runs/birds/bundle birds --c 0", "--c must be above 0; got 0.0"),
        ("plan resnett50", "timm has no backbone 'resnett50': did you mean resnet50, resnet50t, resnet50s?"),
        (
            "train --data birds --recipe resnet50-bird",
            "resnet50-bird is not a recipe: did you mean resnet50-birds? pass your own recipe as a .yaml "
            "file",
        ),
        (
            "train --data birds --recipe near_key.yaml",
            "near_key.yaml: a recipe has no schedule.epoch; is it schedule.epochs?",
        ),
        (
            "train --data birds --recipe wrong_value.yaml",
            "wrong_value.yaml: schedule.epochs takes a whole number; got many",
        ),
        (
            f"train --data others {FEW}",
            "others has no training images of 1 of its 2 classes, first of 'owl': add some, or take the "
            "class out of all splits ('covpool check' lists them)",
        ),
        (
            "eval runs/birds/bundle strangers",
            "strangers has 2 classes that the bundle does not know, first 'a': give the images that it is "
            "for",
        ),
        (
            "eval five birds",
            "the bundle has 5 classes, and birds has 3: give the images that it is for",
        ),
        (
            "explain runs/birds/bundle torn/a/0.jpg",
            "torn/a/0.jpg cannot be explained: none of its images is readable. Run covpool check to see why.",
        ),
        (
            "predict runs/birds/bundle birds --out birds",
            "birds holds other files, such as 'test': use a new or empty folder as --out",
        ),
        *(
            (
                f"{verb} runs/birds/bundle birds --out birds/among",
                "results would go into the images themselves, as birds/among is in birds: give --out",
            )
            for verb in ("eval", "retrieve")
        ),
        (
            "train --data birds --batch-size 99",
            "--batch-size 99 is larger than the training set (11 images): use a smaller one",
        ),
    ],
)
def test_a_sentence_that_says_what_to_do(
    command: str,
    sentence: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    assert complaint(command, capsys) == sentence


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("eval damaged birds", "model.safetensors is truncated, 20000 bytes instead of "),
        ("train --data birds --pool isqrtcov", "got 'isqrtcov': did you mean 'isqrt_cov'?"),
        (
            "train --data birds --recipe wrong_key.yaml",
            "no optimizer.learning_rate; optimizer has name, lr, ",
        ),
        ("eval runs/birds/bundle birds --seed -1", "seed must be at least 0; got -1"),
        ("retrieve runs/birds/bundle birds --at []", "--at is empty"),
        ("convert model.pt there --classes latin.txt", "latin.txt is not UTF-8 text"),
        ("shard birds --index --classes latin.txt", "latin.txt is not UTF-8 text"),
        ('plan resnet18 --backbone-options {"block":1}', "timm cannot build resnet18 with {'block': 1}"),
        (f"train --data torn {FEW} --out torn-run", "'covpool check' lists the unreadable images"),
    ],
)
def test_a_longer_sentence(
    command: str, part: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert part in complaint(command, capsys)


def test_an_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--data", "birds"]) == 2
    assert capsys.readouterr() == ("", "covpool: 'trian' is not a verb: did you mean train?\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [f"train birds {FEW}", "eval runs/birds/bundle birds"])
def test_no_gpu(
    command: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    sentence = "--device is cuda, but torch sees no GPU here: pass cpu"
    assert complaint(f"{command} --device cuda", capsys) == sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("verb", ["explain", "diagnose"])
def test_no_gpu_for_the_bundle(verb: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = complaint(f"{verb} {place}/runs/birds/bundle {place}/birds --device cuda", capsys)
    assert "cuda" in message
    assert "here: " in message


def test_another_recipe_in_the_same_folder(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(
        read_recipe("modern", {"data.path": "birds", "schedule.epochs": 9}), tmp_path / "recipe.yaml"
    )
    assert complaint(f"train --data {place}/birds --epochs 10 --out {tmp_path}", capsys) == (
        f"{tmp_path} was started with --epochs 9, not 10: use the same values, or another --out"
    )


@pytest.fixture(params=["ro", "size=4k"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A real file system that is read-only or has little space."""
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield request.param, tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_takes_nothing(
    disk: tuple[str, Path], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, folder = disk
    message = complaint(
        f"embed {place}/runs/birds/bundle {place}/birds --workers 0 --out {folder}/out", capsys
    )
    assert message.startswith(f"{folder}/out")
    if kind == "ro":
        assert message.endswith(": Read-only file system: use another folder")
    else:
        assert message.endswith(": No space left on device: free some space, and rerun the command")


@pytest.mark.parametrize("words", ["check BIRDS", "check --help", "--help", "--version"])
def test_a_full_disk_where_the_output_goes(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    full = open("/dev/full", "w")  # noqa: SIM115  # closing it writes the buffered output and fails
    monkeypatch.setattr(sys, "stdout", full)
    code = main(words.replace("BIRDS", f"{place}/birds").split())
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()
    assert code == 2
    sentence = "No space left on device: free some space, and rerun the command"
    command = "covpool check" if "check" in words else "covpool"
    assert capsys.readouterr().err == f"{command}: {sentence}\n"


@pytest.mark.parametrize(
    ("package", "command", "sentence"),
    [
        (
            "faiss",
            "retrieve BUNDLE BIRDS --engine faiss",
            "--engine faiss needs faiss: pip install 'covpool[faiss]'",
        ),
        ("ray", "predict BUNDLE BIRDS --engine ray", "--engine ray needs ray: pip install 'covpool[scale]'"),
        (
            "wandb",
            f"train --data BIRDS {FEW} --trackers [wandb]",
            "wandb is missing: pip install 'covpool[wandb]'",
        ),
    ],
)
def test_a_package_that_is_not_there(
    package: str,
    command: str,
    sentence: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # import then fails as for a missing package
    monkeypatch.delitem(sys.modules, "covpool.inference.ray_engine", raising=False)
    monkeypatch.chdir(tmp_path)
    command = command.replace("BUNDLE", f"{place}/runs/birds/bundle").replace("BIRDS", f"{place}/birds")
    assert complaint(command, capsys) == sentence


def test_an_address_that_nobody_answers_at(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("covpool.storage.remote.pauses_before", lambda retries: ())
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/birds.tar"
        message = complaint(f"predict {place}/runs/birds/bundle {address} --workers 0", capsys)
    assert message.startswith(address)
    assert ("cannot be reached" if find_spec("aiohttp") else "to be installed") in message


MEMORY = """
import resource, sys
import timm, torchvision  # which take memory of their own
from covpool.cli.main import main
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 100 * 2**20, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells there what a process takes")
def test_not_enough_memory(place: Path, tmp_path: Path) -> None:
    # The weights from 4,095 covariance values to 20,000 hidden units take 328 MB.
    network = "--model test_resnet --model.head mlp --model.hidden [20000] --dim 90"
    command = f"train --data {place}/birds {network} --batch-size 4 --device cpu --out {tmp_path}/run".split()
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # each thread reserves address space for its stack
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 2, run.stderr[-2000:]
    assert run.stderr.splitlines()[-1] == (
        "covpool train: the machine does not have enough memory: use a smaller batch size or smaller images"
    )


def test_a_file_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ('"\\e]0;owned\\a": 1\n', 'schedule: {epochs: "\\e[2J"}\n', '"\\u202eabc": 1\n'):
        Path("recipe.yaml").write_text(text, "utf-8")
        message = complaint("train birds --recipe recipe.yaml", capsys)
        assert message.startswith(("recipe.yaml: a recipe has no ?", "recipe.yaml: schedule.epochs takes"))
        assert message.isprintable()


def test_a_killed_process_of_the_data(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system kills processes like this when memory is full."""
    own = os.getpid()

    def read(self: ImageFiles, i: int) -> bytes:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        return b""

    monkeypatch.setattr(ImageFiles, "read", read)
    few = FEW.replace("--workers 0", "--workers 1")
    message = complaint(f"train {place}/birds {few} --val-fraction 0 --out {tmp_path}/run", capsys)
    assert message == (
        "a process that reads images was killed, perhaps because the memory was full: use fewer --workers, "
        "and rerun the command"
    )


def test_debug_shows_where(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(place / "nowhere"), "--debug"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback")
    assert "\nFileNotFoundError: " in errors
