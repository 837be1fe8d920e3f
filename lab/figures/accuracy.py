"""Write the accuracies of the pages from results: ``python -m lab figures accuracy``.

The results are those of contest, one_pass and cub_epochs. It writes the blocks between the marks
``accuracy``, ``contest``, ``settings`` and ``cub_epochs`` of README.md and docs, two pictures, and every
figure between ``<!-- SOURCE ROW KEY -->`` and ``<!-- end -->``; see :func:`figures`. Rows that were not run
are listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from covpool.drawing import LIGHT, dress, new_figure, png
from covpool.evaluate.probe.record import difference
from covpool.provenance import release
from lab.experiments import contest_heads, contest_table, cub_epochs
from lab.experiments.one_pass import BACKBONES, Row, committed_summaries
from lab.record import RESULTS, ROOT, read_record, shown_file, with_block

DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "answers").glob("*.md")))
BARS = DOCS / "images" / "hero.png"
INTERVALS = DOCS / "images" / "accuracy.png"
QUOTED = re.compile(r"(<!-- (accuracy|one_pass|contest) (\S+) (.+?) -->).*?(<!-- end -->)")
NOT_RUN = "not run"
# Large sets and large images first.
SETS = ("cars", "cub", "flowers", "sparrows")
ORDERED = sorted(contest_heads.CASES, key=lambda row: (SETS.index(row.data), row.backbone, -row.size))
COLORS = {"gap": "#b6bec7", "attention": "#e39c3c", "isqrt_cov": "#0b6bb8"}
TITLES = {"gap": "average pooling", "attention": "attention head", "isqrt_cov": "covariance pooling"}


class Compared(NamedTuple):
    """The accuracies of the three kinds of heads on a data set with a backbone.

    Each one is that of the better classifier on held-out images, trained or in closed form, from the contest.
    Where both poolings have not run there, they are in closed form, from one_pass.
    """

    row: Row
    gap: float
    attention: float | None
    isqrt_cov: float
    over_gap: dict[str, float]
    over_attention: dict[str, float] | None
    incomplete: frozenset[str] = frozenset()  # kinds with trials left


def compared(summaries: Mapping[str, Any], record: Mapping[str, Any] | None) -> list[Compared]:
    """Return the accuracies of every data set and backbone that has results, in the order of the tables."""
    found = []
    for case in ORDERED:
        rows = contest_table.summary(case, record["cells"].get(case.name, {})) if record else []
        ours, gap = (contest_table.counted(rows, head) for head in ("isqrt_cov", "gap"))
        rival = next((row for row in rows if row["head"] == row["rival"]), None)
        if ours and gap:
            kinds = {"gap": "gap", "attention": ours["rival"], "isqrt_cov": "isqrt_cov"}
            left = frozenset(
                kind
                for kind, head in kinds.items()
                for row in rows
                if head and row["head"] in contest_table.versions(head) and not row["complete"]
            )
            attention = rival["top1"] if rival else None
            overs = (ours["over_gap"], ours["over_rival"])
            found.append(Compared(case, gap["top1"], attention, ours["top1"], *overs, left))
        elif one := summaries.get(case.name):
            found.append(Compared(case, one["gap"], None, one["isqrt_cov"], one["over_gap"], None))
    return found


def table(measured: Sequence[Compared]) -> str:
    """Return the accuracies as Markdown, the best one of each row in bold; list the sets not run."""
    names = (*TITLES.values(), "gain over average pooling", "gain over attention head")
    lines = [f"| data set | frozen backbone | {' | '.join(names)} |", "|---" * 7 + "|"]
    for one in measured:
        row, accuracies = one.row, {key: getattr(one, key) for key in TITLES}
        best = max(value for value in accuracies.values() if value is not None)
        cells = [set_name(row), f"{BACKBONES[row.backbone][1]}, {row.size} px"]
        for key, value in accuracies.items():
            bold, left = "**" if value == best else "", "\\*" if key in one.incomplete else ""
            cells.append("–" if value is None else f"{bold}{100 * value:.1f} %{bold}{left}")
        cells += [difference(over) or "–" for over in (one.over_gap, one.over_attention)]
        lines.append(f"| {' | '.join(cells)} |")
    missing = [words(row) for row in ORDERED if row not in [one.row for one in measured]]
    notes = ["\\* Some trials of settings are left."] if any(one.incomplete for one in measured) else []
    notes += [f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n".join([*lines, *(["", " ".join(notes)] if notes else [])])


def set_name(row: Row) -> str:
    """Return the short name of a data set."""
    return row.title.partition(",")[0].removesuffix(" of CUB-200-2011")


def words(row: Row, between: str = ", ") -> str:
    """Return the data set, the backbone and the image size of a row."""
    return f"{set_name(row)}{between}{BACKBONES[row.backbone][1]}, {row.size} px"


def figures(
    summaries: Mapping[str, Any], record: Mapping[str, Any] | None
) -> dict[str, dict[str, dict[str, str]]]:
    """Return the figures that pages quote, by source, row and key.

    ``accuracy`` has the cells of :func:`table`; ``one_pass`` has closed forms: ``gap``, ``isqrt_cov``,
    ``over_gap``, ``dim``, and ``d=64`` and others; ``contest`` has every head, its core-minutes as
    ``HEAD minutes``, the best attentive one as ``rival`` and ``rival top1``, and the lead of isqrt_cov over
    it as ``lead``.
    """
    kinds, one_pass, contest = {}, {}, {}
    for one in compared(summaries, record):
        values = {key: f"{100 * value:.1f}" for key in TITLES if (value := getattr(one, key)) is not None}
        overs = {"over_gap": one.over_gap, "over_attention": one.over_attention}
        kinds[one.row.name] = values | {key: difference(over) for key, over in overs.items() if over}
    for name, row in summaries.items():
        values = {"gap": row["gap"], "isqrt_cov": row["isqrt_cov"]}
        values |= {f"d={dim}": accuracy for dim, accuracy in row["by_dim"].items()}
        one_pass[name] = {key: f"{100 * value:.1f}" for key, value in values.items()}
        one_pass[name] |= {"over_gap": difference(row["over_gap"]), "dim": str(row["dim"])}
    for case in contest_heads.CASES:
        rows = contest_table.summary(case, record["cells"].get(case.name, {})) if record else []
        of_case = {row["head"]: f"{100 * row['top1']:.1f}" for row in rows}
        of_case |= {f"{row['head']} minutes": f"{row['minutes']:.0f}" for row in rows}
        if rows and (rival := rows[0]["rival"]):
            of_case |= {"rival": f"`{rival}`", "rival top1": of_case[rival], "lead": lead(rows) or NOT_RUN}
        contest[case.name] = of_case
    return {"accuracy": kinds, "one_pass": one_pass, "contest": contest}


def quoted(text: str, known: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """Return a page in which every marked figure is that of the results."""

    def figure(mark: re.Match[str]) -> str:
        source, row, key = mark.group(2, 3, 4)
        return f"{mark[1]}{known[source].get(row, {}).get(key, NOT_RUN)}{mark[5]}"

    return QUOTED.sub(figure, text)


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


def draw_bars(measured: Sequence[Compared]) -> bytes:
    """Return the picture of the home page: a bar for each kind of head on each set."""
    figure = new_figure(LIGHT, 6.4, 0.9 + 0.74 * len(measured))
    axes = _axes(figure, [words(one.row, "\n") for one in measured])
    bars = dict[str, list[tuple[float, float]]]()
    for place, one in enumerate(measured):
        values = {key: value for key in TITLES if (value := getattr(one, key)) is not None}
        for offset, (key, value) in zip(_offsets(len(values), 0.27), values.items(), strict=True):
            bars.setdefault(key, []).append((place + offset, 100 * value))
    for key in (key for key in TITLES if key in bars):
        axes.barh(*zip(*bars[key], strict=True), height=0.25, color=COLORS[key], label=TITLES[key])
        for at, accuracy in bars[key]:
            axes.text(accuracy + 0.6, at, f"{accuracy:.1f}", va="center", fontsize=8, color=LIGHT.ink)
    axes.set(xticks=[], xlim=(0, 110))
    axes.spines["bottom"].set_visible(False)
    figure.legend(loc="outside lower right", ncols=3, frameon=False)
    axes.set_title("Top-1 accuracy in %, frozen backbones", loc="left", fontsize=11, color=LIGHT.ink)
    return png(figure, dpi=200)


def draw_intervals(measured: Sequence[Compared]) -> bytes:
    """Return the picture of the benchmarks: the leads of isqrt_cov on each set, with their intervals."""
    figure = new_figure(LIGHT, 6.4, 1.4 + 0.6 * len(measured))
    axes = _axes(figure, [words(one.row, "\n") for one in measured])
    axes.axvline(0, color=LIGHT.faint, lw=1)
    colors = {"over_gap": COLORS["isqrt_cov"], "over_attention": COLORS["attention"]}
    for place, one in enumerate(measured):
        overs = {key: over for key in colors if (over := getattr(one, key))}
        for offset, (key, over) in zip(_offsets(len(overs), 0.34), overs.items(), strict=True):
            low, mean, high = (100 * over[name] for name in ("low", "mean", "high"))
            at = place + offset
            axes.plot([low, high], [at, at], color=colors[key], lw=2.5, solid_capstyle="round")
            axes.plot(mean, at, "o", color=colors[key], ms=7)
            axes.text(high + 0.4, at, f"{mean:+.1f}", va="center", fontsize=9)
    for key, color in colors.items():
        axes.plot([], [], "o", color=color, label=f"over {TITLES[key.removeprefix('over_')]}")
    axes.set_xlim(right=axes.get_xlim()[1] + 1.5)
    axes.grid(visible=True, axis="x", color=LIGHT.faint, alpha=0.25)
    axes.set_xlabel("percentage points, with 95 % interval", color=LIGHT.ink)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    axes.set_title("Gain of covariance pooling in top-1 accuracy", loc="left", fontsize=11, color=LIGHT.ink)
    return png(figure, dpi=200)


def _offsets(count: int, step: float) -> list[float]:
    """Return the distances of some marks from the middle of their line."""
    return [step * (k - (count - 1) / 2) for k in range(count)]


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
    summaries, record = committed_summaries(), _committed(contest_heads.NAME)
    blocks = {
        "accuracy": table(compared(summaries, record)),
        contest_heads.NAME: contest_tables(record),
    }
    if record is not None:
        blocks["settings"] = contest_table.settings_table(record)
    if (epochs := _committed(cub_epochs.NAME)) is not None:
        blocks[cub_epochs.NAME] = cub_epochs.table(epochs)
    written, known = {}, figures(summaries, record)
    for page in PAGES:
        text = quoted(page.read_text("utf-8"), known)
        for name, block in blocks.items():
            text = with_block(text, name, block) if f"<!-- {name}:begin -->" in text else text
        written[page] = text
    return written


def _committed(name: str) -> dict[str, Any] | None:
    file = shown_file(RESULTS / release(), name)
    return None if file is None else read_record(file)


def write_pages() -> list[Path]:
    """Write the accuracies of the pages, docs/images/hero.png and docs/images/accuracy.png."""
    changed = []
    for page, text in pages().items():
        if text != page.read_text("utf-8"):
            page.write_text(text, "utf-8")
            changed.append(page)
    measured = compared(committed_summaries(), _committed(contest_heads.NAME))
    BARS.write_bytes(draw_bars(measured))
    INTERVALS.write_bytes(draw_intervals(measured))
    return [*changed, BARS, INTERVALS]
