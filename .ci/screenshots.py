"""Draw the reports and the terminal in docs/images: ``.ci/screenshots.py FOLDER covpool``.

FOLDER has the images in ``birds`` and the run of docs/training.md in ``runs/birds-train``. ``covpool`` is the
path of the command, which runs on a pseudo-terminal. The script needs Chromium and the packages pillow, pyte
and rich.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
from io import BytesIO, StringIO
from pathlib import Path

import pyte
from PIL import Image
from rich.console import Console
from rich.style import Style
from rich.text import Text

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS, LINES = 126, 40
# Width of pages in pixels, before they are drawn at twice the size.
WIDTH = 1000
COMMANDS = (
    "covpool check birds",
    "covpool train --data birds --out runs/birds-once --image-size 160 --epochs 5 \\\n"
    "    --model tf_efficientnet_lite0 --weights.path lite0.pth --weights.key-map order",
)


def photograph(page: Path, height: int, name: str) -> None:
    """Save a screenshot of the top of a page in 256 colors, enough for text and lines."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    shot = page.with_name("screenshot.png")
    size = ["--force-device-scale-factor=2", f"--window-size={WIDTH},{height}", f"--screenshot={shot}"]
    quiet = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    subprocess.run([chromium, *quiet, *size, page.resolve().as_uri()], check=True, capture_output=True)
    made = BytesIO()
    Image.open(shot).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    shot.unlink()
    (IMAGES / name).write_bytes(made.getvalue())
    print(f"{name}: {len(made.getvalue()) // 1000} kB")


def run_on_a_terminal(words: list[str], folder: Path, screen: pyte.Screen) -> list[list[Text]]:
    """Run a command; return the screen after each output that shows a progress bar, and at the end."""
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
        os.execvp(words[0], words)
    shown = []
    while True:
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the command has ended
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code not in (0, 1):  # check exits with 1 if it found something
                sys.exit(f"{' '.join(words)} ended with {code}")
            return [*shown, lines_of(screen)]
        if any("━" in line for line in screen.display):
            shown.append(lines_of(screen))


def lines_of(screen: pyte.Screen) -> list[Text]:
    """Return the lines of a screen with their colors, without empty lines at the end."""
    lines = []
    for row in range(screen.lines):
        line = Text()
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            colour = None if cell.fg == "default" else f"#{cell.fg}" if len(cell.fg) == 6 else cell.fg
            line.append(cell.data, Style(color=colour, bold=cell.bold))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def draw_terminal(folder: Path, command: str) -> None:
    """Draw ``covpool check``, and ``covpool train`` when most of it is done."""
    shutil.rmtree(folder / "runs/birds-once", ignore_errors=True)
    screen = pyte.Screen(COLUMNS, LINES)
    screen.set_mode(pyte.modes.LNM)
    for line in COMMANDS:
        pyte.Stream(screen).feed(f"$ {line}\n")
        words = line.replace("\\\n", "").split()
        shown = run_on_a_terminal([command, *words[1:]], folder, screen)
    console = Console(record=True, width=COLUMNS, file=StringIO())
    for line in shown[int(0.9 * (len(shown) - 1))]:
        console.print(line, soft_wrap=True)
    # Without font faces: a browser would download them from another site.
    svg = re.sub(r"@font-face\s*{.*?}", "", console.export_svg(title="covpool"), flags=re.DOTALL)
    (IMAGES / "terminal.svg").write_text(svg, encoding="utf-8")
    print(f"terminal.svg: {len(svg) // 1000} kB")


if __name__ == "__main__":
    of, command = Path(sys.argv[1]), sys.argv[2]
    photograph(of / "runs/birds-train/report.html", 930, "comparison.png")
    photograph(of / "runs/birds-train/isqrt_cov/report.html", 975, "report.png")
    draw_terminal(of, str(Path(command).absolute()))
