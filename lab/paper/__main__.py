"""Rewrite the tables and figures of the results, and docs/results.md."""

from pathlib import Path

from lab.paper.page import write

print("\n".join(map(str, write(Path("results"), Path("docs/results.md")))))
