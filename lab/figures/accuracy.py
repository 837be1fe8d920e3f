"""Write the accuracies of the pages from results: ``python -m lab figures accuracy``.

The results are those of one_pass, contest and cub_epochs. It writes the blocks between the marks
``accuracy``, ``contest``, ``settings`` and ``cub_epochs`` of README.md and docs, two pictures, and every
figure between ``<!-- one_pass ROW KEY -->`` or ``<!-- contest CASE HEAD -->`` and ``<!-- end -->``. Rows that
were not run are listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covpool.drawing import LIGHT, dress, new_figure, png
from covpool.evaluate.probe.record import difference
from covpool.provenance import release
from lab.experiments import contest_heads, contest_table, cub_epochs
from lab.experiments.one_pass import BACKBONES, ROWS, Row, committed_summaries
from lab.record import RESULTS, ROOT, read_record, shown_file, with_block

DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "answers").glob("*.md")))
BARS = DOCS / "images" / "hero.png"
INTERVALS = DOCS / "images" / "accuracy.png"
QUOTED = re.compile(r"(<!-- (one_pass|contest) (\S+) (.+?) -->).*?(<!-- end -->)")
NOT_RUN = "not run"
# Large sets and large images first.
SETS = ("cars", "cub", "flowers", "sparrows")
ORDERED = sorted(ROWS, key=lambda row: (SETS.index(row.data), row.backbone, -row.size))
COLORS = ("#b6bec7", "#0b6bb8")


def table(summaries: Mapping[str, Any], contest: Mapping[str, Mapping[str, str]]) -> str:
    """Return the accuracy of both poolings and of trained heads on every set; list the sets not run."""
    lines = [
        "| data set | frozen backbone | average pooling | covariance pooling "
        "| gain in percentage points (95 % interval) | trained: average pooling | trained: attention head |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in measured(summaries):
        one, trained = summaries[row.name], contest.get(row.name, {})
        cells = [set_name(row), f"{BACKBONES[row.backbone][1]}, {row.size} px", f"{100 * one['gap']:.1f} %"]
        cells += [f"**{100 * one['isqrt_cov']:.1f} %**", difference(one["over_gap"])]
        cells += [f"{trained['gap']} %" if "gap" in trained else "–"]
        cells += [f"{trained['rival top1']} %" if "rival" in trained else "–"]
        lines.append(f"| {' | '.join(cells)} |")
    missing = [f"{words(row)}" for row in ORDERED if row.name not in summaries]
    return "\n".join([*lines, *(["", f"Not run yet: {'; '.join(missing)}."] if missing else [])])


def measured(summaries: Mapping[str, Any]) -> list[Row]:
    """Return the rows that have results, in the order of the tables."""
    return [row for row in ORDERED if row.name in summaries]


def set_name(row: Row) -> str:
    """Return the short name of a data set."""
    return row.title.partition(",")[0].removesuffix(" of CUB-200-2011")


def words(row: Row, between: str = ", ") -> str:
    """Return the data set, the backbone and the image size of a row."""
    return f"{set_name(row)}{between}{BACKBONES[row.backbone][1]}, {row.size} px"


def quoted(text: str, summaries: Mapping[str, Any], contest: Mapping[str, Mapping[str, str]]) -> str:
    """Return a page in which every marked figure is that of the results."""

    def figure(mark: re.Match[str]) -> str:
        source, row, key = mark.group(2, 3, 4)
        if source == "one_pass":
            new = value(summaries.get(row), key)
        else:
            new = contest.get(row, {}).get(key, NOT_RUN)
        return f"{mark[1]}{new}{mark[5]}"

    return QUOTED.sub(figure, text)


def of_contest(record: Mapping[str, Any] | None) -> dict[str, dict[str, str]]:
    """Return figures of the contest by case: accuracies, and leads over the best attentive head."""
    contest = {}
    for case in contest_heads.CASES:
        rows = contest_table.summary(case, record["cells"].get(case.name, {})) if record else []
        figures = {row["head"]: f"{100 * row['top1']:.1f}" for row in rows}
        if rows and (rival := rows[0]["rival"]):
            figures |= {"rival": f"`{rival}`", "rival top1": figures[rival], "lead": lead(rows) or NOT_RUN}
        contest[case.name] = figures
    return contest


def value(one: Mapping[str, Any] | None, key: str) -> str:
    """Return a figure of a row as text: ``gap``, ``isqrt_cov``, ``over_gap``, ``dim``, or ``d=64``."""
    if one is None:
        return NOT_RUN
    if key == "over_gap":
        return difference(one[key])
    if key == "dim":
        return str(one[key])
    accuracy = one["by_dim"][key.removeprefix("d=")] if key.startswith("d=") else one[key]
    return f"{100 * accuracy:.1f}"


def contest_tables(record: Mapping[str, Any] | None) -> str:
    """Return a table of all heads and sets, a folded one per set, and how much of the contest is left."""
    cells = record["cells"] if record else {}
    measured = {case: contest_table.summary(case, cells.get(case.name, {})) for case in contest_heads.CASES}
    measured = {case: rows for case, rows in measured.items() if rows}
    total = len(contest_heads.CASES) * len(contest_heads.HEADS)
    left = len(contest_heads.not_run(record)) if record else total
    missing = f"Not run yet: {left} of {total} combinations of a head, a data set and a backbone."
    if not measured:
        return missing
    lines = [*_all_heads(measured), "", f"{contest_table.COUNTS} {missing}", "", '<details markdown="1">']
    lines += ["<summary>Gains with intervals, and times</summary>", ""]
    for case, rows in measured.items():
        rows.sort(key=lambda row: -row["top1"])
        titles, *gains = contest_table.gains_and_times(rows)
        lines += [f"**{case.title}**", ""]
        lines += [
            f"| {' | '.join(['head', 'top-1 accuracy, %', *titles])} |",
            "|---" * (2 + len(titles)) + "|",
        ]
        for row, over in zip(rows, gains, strict=True):
            named = [contest_table.label(row["head"]), contest_table.accuracy(row)]
            lines.append(f"| {' | '.join([*named, *over])} |")
        lines += [""]
    return "\n".join([*lines, "</details>"])


def lead(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the gain of isqrt_cov over the best attentive head of a case, if both were run."""
    over = contest_table.counted(rows, "isqrt_cov").get("over_rival")
    return difference(over) if over else None


def _all_heads(measured: Mapping[contest_heads.Case, list[dict[str, Any]]]) -> list[str]:
    """Return the accuracies of all heads, and the leads of isqrt_cov over the best attentive head."""
    by_case = {case: {row["head"]: row for row in rows} for case, rows in measured.items()}
    best = {
        case: max(row["top1"] for row in rows if row["counts"])
        for case, rows in measured.items()
        if lead(rows)
    }
    lines = [
        f"| head | {' | '.join(words(case, '<br>') for case in measured)} |",
        "|---" * (1 + len(measured)) + "|",
    ]
    for head in contest_heads.BY_KIND:
        cells = []
        for case, rows in by_case.items():
            if head not in rows:
                cells.append("–")
                continue
            bold = "**" if rows[head]["counts"] and rows[head]["top1"] == best.get(case) else ""
            cells.append(f"{bold}{contest_table.accuracy(rows[head])}{bold}")
        lines.append(f"| {contest_table.label(head)} | {' | '.join(cells)} |")
    leads = [lead(rows) or "–" for rows in measured.values()]
    lines.append(f"| gain of `isqrt_cov` over the best attentive head | {' | '.join(leads)} |")
    return lines


def draw_bars(summaries: Mapping[str, Any]) -> bytes:
    """Return the picture of the home page: a pair of bars for each set."""
    rows = measured(summaries)
    figure = new_figure(LIGHT, 6.4, 0.9 + 0.62 * len(rows))
    axes = _axes(figure, [words(row, "\n") for row in rows])
    for (key, title), offset, color in zip(
        (("gap", "average pooling"), ("isqrt_cov", "covariance pooling")), (-0.19, 0.19), COLORS, strict=True
    ):
        accuracies = [100 * summaries[row.name][key] for row in rows]
        places = [place + offset for place in range(len(rows))]
        axes.barh(places, accuracies, height=0.36, color=color, label=title)
        for place, accuracy in zip(places, accuracies, strict=True):
            axes.text(accuracy + 0.6, place, f"{accuracy:.1f}", va="center", fontsize=9, color=LIGHT.ink)
    axes.set(xticks=[], xlim=(0, 110))
    axes.spines["bottom"].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    title = "Top-1 accuracy in %, without training"
    axes.set_title(title, loc="left", fontsize=11, color=LIGHT.ink)
    return png(figure, dpi=200)


def draw_intervals(summaries: Mapping[str, Any]) -> bytes:
    """Return the picture of the benchmarks: the difference of the poolings on each set, with its interval."""
    rows = measured(summaries)
    figure = new_figure(LIGHT, 6.4, 1.2 + 0.5 * len(rows))
    axes = _axes(figure, [words(row, "\n") for row in rows])
    axes.axvline(0, color=LIGHT.faint, lw=1)
    for place, row in enumerate(rows):
        low, mean, high = (100 * summaries[row.name]["over_gap"][key] for key in ("low", "mean", "high"))
        axes.plot([low, high], [place, place], color=COLORS[1], lw=2.5, solid_capstyle="round")
        axes.plot(mean, place, "o", color=COLORS[1], ms=8)
        axes.text(high + 0.4, place, f"+{mean:.1f}" if mean > 0 else f"{mean:.1f}", va="center", fontsize=10)
    axes.set_xlim(right=axes.get_xlim()[1] + 1.5)
    axes.grid(visible=True, axis="x", color=LIGHT.faint, alpha=0.25)
    axes.set_xlabel("percentage points, with 95 % interval", color=LIGHT.ink)
    title = "Top-1 accuracy: covariance pooling minus average pooling"
    axes.set_title(title, loc="left", fontsize=11, color=LIGHT.ink)
    return png(figure, dpi=200)


def _axes(figure: Any, names: list[str]) -> Any:
    """Return axes with a named line per set, the first one at the top."""
    axes = figure.subplots()
    dress(axes, LIGHT)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(length=0)
    return axes


def pages() -> dict[Path, str]:
    """Return the pages that quote accuracies, with the figures of the results."""
    summaries = committed_summaries()
    shown = (shown_file(RESULTS / release(), name) for name in (contest_heads.NAME, cub_epochs.NAME))
    record, epochs = (None if file is None else read_record(file) for file in shown)
    contest = of_contest(record)
    blocks = {"accuracy": table(summaries, contest), contest_heads.NAME: contest_tables(record)}
    if record is not None:
        blocks["settings"] = contest_table.settings_table(record)
    if epochs is not None:
        blocks[cub_epochs.NAME] = cub_epochs.table(epochs)
    written = {}
    for page in PAGES:
        text = quoted(page.read_text("utf-8"), summaries, contest)
        for name, block in blocks.items():
            text = with_block(text, name, block) if f"<!-- {name}:begin -->" in text else text
        written[page] = text
    return written


def write_pages() -> list[Path]:
    """Write the accuracies of the pages, docs/images/hero.png and docs/images/accuracy.png."""
    changed = []
    for page, text in pages().items():
        if text != page.read_text("utf-8"):
            page.write_text(text, "utf-8")
            changed.append(page)
    summaries = committed_summaries()
    BARS.write_bytes(draw_bars(summaries))
    INTERVALS.write_bytes(draw_intervals(summaries))
    return [*changed, BARS, INTERVALS]
