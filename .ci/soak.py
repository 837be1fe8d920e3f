"""Test long jobs under kills, a full disk and a flaky server: ``.ci/soak.py MINUTES IMAGES``.

IMAGES is a folder with ``train`` and ``val`` by class. Rounds run until the time is over. Each round runs one
job, or the short cases of ``.ci/hazards.py``. Training and bulk inference are killed every 20 to 60 seconds
and rerun until they are done. Training must then have the weights of an undisturbed run. Bulk inference must
have written every row once, with the same values. Every event is appended to ``.ci/logs/soak.log``. The test
of a full disk needs root, to mount a small file system.
"""

import csv
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".ci" / "logs" / "soak.log"
PAUSES = (20, 60)  # seconds between kills: smallest and largest
TRAIN = (
    "--model lcnet_050 --image-size 64 --batch-size 50 --epochs 12 --workers 1 --dim 32 --deterministic true"
)
WORDS = [*TRAIN.split(), "--checkpoint-steps", "20", "--limit", "2000"]


def log(line: str) -> None:
    """Print a line, and append it to the log."""
    line = f"{time.strftime('%H:%M:%S', time.gmtime())}  {line}"
    print(line, flush=True)
    with LOG.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def covpool(*words: object) -> subprocess.Popen[str]:
    """Start a command in a new process group."""
    command = [sys.executable, "-m", "covpool", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


def undisturbed(*words: object) -> str:
    """Run a command to its end, and return its output."""
    process = covpool(*words)
    text, _ = process.communicate()
    if process.returncode:
        sys.exit(f"covpool {words[0]} ended with {process.returncode}:\n{text}")
    return text


def killed(*words: object) -> int:
    """Run a command with a SIGKILL every 20 to 60 s until it is done, and return the number of kills."""
    kills = 0
    while True:
        process = covpool(*words)
        try:
            text, _ = process.communicate(timeout=random.uniform(*PAUSES))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            kills += 1
            continue
        if process.returncode:
            sys.exit(f"covpool {words[0]} ended with {process.returncode} after {kills} kills:\n{text}")
        return kills


def digest(bundle: Path) -> str:
    """Return the hash of the weights of a bundle."""
    return hashlib.sha256((bundle / "model.safetensors").read_bytes()).hexdigest()


def rows(folder: Path) -> dict[str, tuple[str, str]]:
    """Return class and error of every row by id; exit if an id occurs twice."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["id"] in found:
                    sys.exit(f"{row['id']} is in {folder} twice")
                found[row["id"]] = (row["label1"], row["error"])
    return found


class Flaky(BaseHTTPRequestHandler):
    """A file server that refuses, resets, delays and truncates some of its responses."""

    folder: Path

    def do_GET(self) -> None:
        """Send a file, or fail at random."""
        chance = random.random()
        data = (self.folder / self.path.lstrip("/")).read_bytes()
        if not self.path.endswith(".csv"):
            if chance < 0.05:
                self.send_error(random.choice((429, 500, 503)))
                return
            if chance < 0.08:
                self.connection.close()
                return
            if chance < 0.10:
                time.sleep(3)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if 0.10 < chance < 0.12 else data)

    def do_HEAD(self) -> None:
        """Respond as to GET."""
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def train_round(images: Path, folder: Path, reference: str) -> None:
    """Kill a training run repeatedly, and compare its weights with the reference."""
    kills = killed("train", images, *WORDS, "--out", folder / "run")
    found = digest(folder / "run" / "bundle")
    log(f"training: {kills} kills, weights equal: {found == reference}")
    if found != reference:
        sys.exit(1)


def disk_round(images: Path, folder: Path, reference: str) -> None:
    """Fill the disk of a training run, free it, and resume."""
    disk = folder / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk]).returncode:
        log("full disk: left out, it needs root")
        return
    try:
        filler = disk / "filler"
        process = covpool("train", images, *WORDS, "--out", disk / "run")
        while process.poll() is None and not list(disk.glob("run/checkpoints/*")):
            time.sleep(0.2)
        filler.write_bytes(b"")
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            except OSError:
                pass
        text, _ = process.communicate()
        sentence = text.strip().splitlines()[-1].replace(str(disk), "DISK")
        log(f"full disk: exit code {process.returncode}: {sentence}")
        if process.returncode == 0:
            sys.exit("the disk was full, and the run did not notice")
        filler.unlink()
        undisturbed("train", images, *WORDS, "--out", disk / "run")
        found = digest(disk / "run" / "bundle")
        log(f"full disk: resumed, weights equal: {found == reference}")
        if found != reference:
            sys.exit(1)
    finally:
        subprocess.run(["umount", disk], check=False)


def predict_round(url: str, bundle: Path, folder: Path, reference: dict[str, tuple[str, str]]) -> None:
    """Kill bulk inference on a flaky server repeatedly, and compare its rows with the reference."""
    words = ["predict", bundle, f"{url}/list.csv", "--out", folder / "rows", "--format", "csv"]
    words += ["--rows-per-file", 50, "--workers", 1, "--retries", 1, "--timeout", 20]
    kills, retries = killed(*words), 0
    while failed := sum(bool(error) for _, error in rows(folder / "rows").values()):
        retries += 1
        if retries > 20:
            sys.exit(f"{failed} rows still fail")
        kills += killed(*words, "--retry", "true")
    found = rows(folder / "rows")
    log(f"bulk inference: {kills} kills, {retries} retries, {len(found)} rows, equal: {found == reference}")
    if found != reference:
        sys.exit(1)


def hazards_round() -> None:
    """Run the short cases of ``.ci/hazards.py``."""
    command = [sys.executable, str(ROOT / ".ci" / "hazards.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        log(line)
    if done.returncode:
        sys.exit(done.stderr)


def main(minutes: float, images: Path) -> None:
    """Run rounds until the time is over."""
    end = time.monotonic() + 60 * minutes
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    log(f"commit {commit}, {time.strftime('%Y-%m-%d', time.gmtime())}, {minutes:g} minutes")
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch)
        undisturbed("train", images, *WORDS, "--out", top / "reference")
        bundle, weights = top / "reference" / "bundle", digest(top / "reference" / "bundle")
        names = sorted(str(path.relative_to(images / "val")) for path in (images / "val").rglob("*.*"))
        served = top / "served"
        served.mkdir()
        for name in {name.split("/")[0] for name in names}:
            (served / name).symlink_to(images / "val" / name)
        (served / "list.csv").write_text("path\n" + "\n".join(names) + "\n", encoding="utf-8")
        Flaky.folder = served
        server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        undisturbed(
            "predict", bundle, served / "list.csv", "--out", top / "rows", "--format", "csv", "--trust-rows"
        )
        expected = rows(top / "rows")
        log(f"undisturbed: weights {weights[:16]}, {len(expected)} rows")
        for number in range(1000):
            folder = top / str(number)
            folder.mkdir()
            if number % 4 == 0:
                hazards_round()
            elif number % 4 == 1:
                predict_round(f"http://127.0.0.1:{server.server_port}", bundle, folder, expected)
            elif number % 4 == 2:
                disk_round(images, folder, weights)
            else:
                train_round(images, folder, weights)
            if time.monotonic() > end:
                break
    log("passed")


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]).resolve())
