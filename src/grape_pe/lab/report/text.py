"""The report for terminals, documents and scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import LabError
from ..files import write_text
from .ranking import budget_blocks, length_blocks, ranking, text_blocks, trend_blocks
from .results import ArmResults, Results
from .statistics import Blocks
from .tables import sweeps, tables
from .verdict import verdict


def table(results: Results) -> str:
    """The tables as text of at most 100 columns, the ranking first."""
    return "\n\n".join((each.title and f"{each.title}:\n") + each.text() for each in tables(results))


def summary(results: Results) -> str:
    """Tables, verdict and notes: what a terminal shows."""
    answer = verdict(results)
    lines = [table(results), "", answer.headline, *(f"  {each}" for each in answer.details)]
    return "\n".join([*lines, *(f"Note: {note}" for note in results.notes)])


def markdown(results: Results) -> str:
    """The answer and all tables as Markdown, for documents: no number needs to be typed."""
    answer = verdict(results)
    parts = [f"**{answer.headline}**", "\n".join(f"- {each}" for each in (*answer.details, *results.notes))]
    for each in tables(results):
        parts += [f"**{each.title}**" if each.title else "", each.markdown()]
    return "\n\n".join(part for part in parts if part) + "\n"


def results_json(results: Results) -> dict[str, Any]:
    """Everything for scripts: every summary with mean, count, spread, low and high."""
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


def write_jsonl(results: Results, out: Path) -> Path:
    """Write what a report reads as one file that `grape report` takes: the comparison, then a line for each run."""
    if len(results.recipes) != 1:
        names = ", ".join(recipe.name for recipe in results.recipes)
        raise LabError(
            f"--jsonl needs one recipe, these have {len(results.recipes)} ({names}); write a file for each"
        )
    recipe = results.recipes[0]
    arms = [{**arm.arm.described(), "label": arm.label} for arm in results.arms]
    about = {name: getattr(recipe, name) for name in ("seeds", "machine", "versions", "command")}
    about |= {"recipe": recipe.settings, "arms": arms, "tasks": results.tasks}
    runs = [line for arm in results.arms for line in _lines(arm, results)]
    lines = [{"kind": "comparison", **about}, *runs]
    write_text(out, "".join(json.dumps(_rounded(line)) + "\n" for line in lines))
    return out


def _lines(arm: ArmResults, results: Results) -> Iterator[dict[str, Any]]:
    """The runs of an arm, as the lines of results.jsonl."""
    for run in arm.evaluations.values():
        yield {"kind": "language", **run.model_dump(exclude_defaults=True), "label": arm.label}
    for seed, scores in arm.scores.items():
        for task in results.tasks if scores else ():
            found = [score.model_dump() for score in scores if score.task == task]
            yield {"kind": "task", "label": arm.label, "seed": seed, "task": task, "scores": found}


def _rounded(value: Any) -> Any:
    """Eight digits: more than a loss has."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
