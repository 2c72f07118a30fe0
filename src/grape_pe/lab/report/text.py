"""The ranking for terminals and for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .ranking import Row, ranking
from .results import Results
from .statistics import Summary
from .verdict import verdict

MEGABYTE = 2**20
WIDTH = 100


def table(results: Results) -> str:
    """The ranking as text of at most 100 columns: mean ± spread over seeds, best validation loss first."""
    rows = ranking(results)
    columns = [("encoding", [row.label for row in rows])]
    optional = [
        ("val loss", [_loss(row.val_loss) or row.status for row in rows]),
        ("behind the best", [_behind(row.behind) for row in rows]),
        (f"at {results.stretch}", [_loss(row.long_loss, 3) for row in rows]),
        ("tasks", [_percent(row.tasks) for row in rows]),
        ("tok/s", [f"{row.speed.mean:,.0f}" if row.speed else "" for row in rows]),
        ("memory", [f"{row.memory.mean / MEGABYTE:,.0f} MB" if row.memory else "" for row in rows]),
        ("seeds", [str(len(row.losses) or len(row.solved)) for row in rows]),
    ]
    columns += [column for column in optional if any(column[1])]
    footer = _footer(rows)
    return "\n".join([*_aligned(columns), *footer])


def _aligned(columns: list[tuple[str, list[str]]]) -> list[str]:
    widths = [max(len(head), *(len(cell) for cell in cells)) for head, cells in columns]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    lines = []
    for row in [[head for head, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]:
        first = _cut(row[0], widths[0]).ljust(widths[0])
        rest = [(cell or "-").rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _footer(rows: list[Row]) -> list[str]:
    said = [f"{row.label}: {row.status}" for row in rows if row.status]
    if rows and all(max(len(row.losses), len(row.solved)) <= 1 for row in rows):
        said.append("one seed each: no spread and no interval")
    return said


def _loss(summary: Summary | None, digits: int = 4) -> str:
    if summary is None:
        return ""
    return f"{summary.mean:.{digits}f}" + (
        "" if summary.spread is None else f" ± {summary.spread:.{digits}f}"
    )


def _behind(gap: Summary | None) -> str:
    if gap is None:
        return ""
    if gap.low is None or gap.high is None:
        return f"{gap.mean:+.4f}"
    return f"{gap.mean:+.3f} ({gap.low:+.3f} … {gap.high:+.3f})"


def _percent(summary: Summary | None) -> str:
    return "" if summary is None else f"{100 * summary.mean:.1f}%"


def _by_seed(values: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): value for seed, value in values.items()}


def results_json(results: Results) -> dict[str, Any]:
    """The ranking and the verdict for scripts: every summary with mean, count, spread, low and high."""
    said = verdict(results)
    rows = [
        {**asdict(row), "losses": _by_seed(row.losses), "solved": _by_seed(row.solved)}
        for row in ranking(results)
    ]
    return {
        "ranking": rows,
        "verdict": asdict(said),
        "train_length": results.train_length,
        "longest": results.longest,
        "recipes": [
            {"name": r.name, "settings": dict(r.settings), "command": r.command} for r in results.recipes
        ],
        "notes": list(results.notes),
    }
