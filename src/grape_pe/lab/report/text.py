"""The report for terminals, documents and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .ranking import budget_blocks, length_blocks, ranking, text_blocks, trend_blocks
from .reading import read_results, shipped_with
from .results import Results
from .statistics import Blocks
from .tables import sweeps, tables
from .verdict import verdict


def table(results: Results, limit: int | None = None) -> str:
    """The tables, or the first `limit`, as text of at most 100 columns, the ranking first.

    Args:
        results: from `read_results`.
        limit: number of tables; all if None.
    """
    return "\n\n".join((each.title and f"{each.title}:\n") + each.text() for each in tables(results)[:limit])


def summary(results: Results, limit: int | None = None) -> str:
    """Tables (or the first `limit`), verdict, notes and shipped results: what a terminal shows."""
    answer, note = verdict(results), results.recipes[0].note.strip()
    lines = [table(results, limit), "", answer.headline, *(f"  {each}" for each in answer.details)]
    lines += [*(f"Note: {note}" for note in results.notes), *([f"\n{note}"] if note else [])]
    if (shipped := shipped_with(results)) is not None:
        lines += [
            f"\nShipped results of grape compare {shipped.stem}:\n",
            summary(read_results([shipped]), 1),
        ]
        lines += [f"In full: grape report --markdown {shipped}"]
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """The answer and all tables as Markdown, for documents: no number needs to be typed.

    Args:
        results: from `read_results`.
    """
    answer = verdict(results)
    parts = [f"**{answer.headline}**", "\n".join(f"- {each}" for each in (*answer.details, *results.notes))]
    for each in tables(results):
        parts += [f"**{each.title}**" if each.title else "", each.markdown()]
    return "\n\n".join(part for part in parts if part) + "\n"


def results_json(results: Results) -> dict[str, Any]:
    """Everything for scripts: every summary with mean, count, spread, low and high.

    Args:
        results: from `read_results`.
    """
    budgets = budget_blocks(results)
    best = list(budgets.values())[-1].best if budgets else ""
    return {
        "ranking": [
            asdict(row) | {"losses": _by_seed(row.losses), "solved": _by_seed(row.solved)} for row in ranking(results)
        ],
        "verdict": asdict(verdict(results)),
        "budgets": [{"tokens": n, **_against(each, best)} for n, each in budgets.items()],
        "budget_trend": _against(trend_blocks(results), best),
        "lengths": [
            {"length": n, "over_seeds": _against(length_blocks(results, n)),
             "over_text": _against(text_blocks(results, n))}
            for n in results.lengths()
        ],
        "sweeps": [
            {**asdict(each), "at_edge": each.at_edge, "losses": {f"{r:g}": loss for r, loss in each.losses.items()}}
            for each in sweeps(results)
        ],
        "lm_scores": {model: scores.to_dict() for model, scores in results.lm_scores.items()},
        "train_length": results.train_length,
        "longest": results.longest,
        "recipes": [{"name": r.name, "settings": dict(r.settings), "command": r.command} for r in results.recipes],
        "notes": list(results.notes),
    }  # fmt: skip


def _against(found: Blocks, best: str = "") -> dict[str, Any]:
    """Means, and the differences to one arm (the best, unless given)."""
    if not found.means:
        return {}
    best = best if best in found.means else found.best
    gaps = {label: asdict(found.difference(label, best)) for label in found.means if label != best}
    return {"means": dict(found.means), "best": best, "behind": gaps, "count": len(found.units)}


def _by_seed(values: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): value for seed, value in values.items()}
