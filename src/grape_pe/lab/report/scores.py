"""Figures of scores: the ranking with its intervals, tasks, speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .figure import Figure, Trace, View, axis, heatmap, one_view, plot_text, short
from .ranking import Kind, Row, loss_blocks, ranking, scored_by, task_blocks
from .results import ArmResults, Results
from .stored import Evaluation, Score
from .style import Style
from .tables import SCORED

Looks = Mapping[str, Style]
SCORE_SCALE = [[0.0, "var(--score-0)"], [0.5, "var(--score-1)"], [1.0, "var(--score-2)"]]
ROW_HEIGHT = 26


def ranking_figure(results: Results, looks: Looks) -> Figure:
    """Validation losses as points: each seed, the mean, and a band for what is not beyond chance."""
    found = loss_blocks(results)
    rows = [row for row in ranking(results) if row.val_loss is not None][::-1]
    data = [trace for row in rows for trace in _ranked(row, looks[row.label])]
    layout: dict[str, Any] = {}
    if found.margin is None or not found.means:
        band_note = " One seed each, so there is no interval: the order may be chance."
    else:
        band_note = (
            " Means in the shaded band are not behind the best beyond chance: its width is the smallest difference of "
            "two means that is. Single seeds vary more than that, since what a seed does to all is taken out."
        )
        low = found.means[found.best]
        band = {"type": "rect", "x0": low, "x1": low + found.margin, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [
            {**band, "fillcolor": "var(--muted)@0.13", "line": {"width": 0}, "layer": "below"}
        ]
    return Figure(
        "ranking",
        "Validation loss",
        f"Left is better. Small marks are seeds, the large one their mean.{band_note}",
        one_view(data),
        layout
        | {
            "xaxis": axis("loss (nats a token)", **_span(rows)),
            "yaxis": {
                "type": "category",
                "categoryarray": [plot_text(row.label) for row in rows],
                "showgrid": True,
            },
        },
        height=70 + ROW_HEIGHT * max(len(rows), 2),
    )


def _span(rows: Sequence[Row]) -> dict[str, list[float]]:
    """All seeds in the frame; wide intervals may leave it."""
    losses = [loss for row in rows for loss in row.losses.values()]
    if not losses:
        return {}
    low, high = min(losses), max(losses)
    margin = 0.35 * (high - low) or 0.01 * abs(high) or 1.0
    return {"range": [low - margin, high + margin]}


def _ranked(row: Row, style: Style) -> list[Trace]:
    summary = row.val_loss
    assert summary is not None
    seeds = list(row.losses.values())
    look = {"color": style.color, "symbol": style.symbol}
    mean: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [short(summary.mean)],
        "y": [plot_text(row.label)],
        "name": plot_text(row.label),
        "meta": {"arm": row.label},
        "marker": {**look, "size": 11},
        "hovertemplate": "%{x:.4f}<extra>%{y}: mean</extra>",
    }
    if summary.count == 1:
        return [mean]
    each: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [short(loss) for loss in seeds],
        "y": [plot_text(row.label)] * len(seeds),
        "meta": {"arm": row.label},
        "marker": {"symbol": "line-ns", "size": 9, "line": {"color": style.color, "width": 1.5}},
        "hovertemplate": "%{x:.4f}<extra>%{y}: a seed</extra>",
    }
    return [each, mean]


def cost_figures(results: Results, looks: Looks) -> list[Figure]:
    """Speed and memory, as bars in the order of the ranking."""
    speed = _bars(
        results, looks, "speed", "Training speed", lambda run: run.tokens_per_second, 1.0,
        "tokens a second", "Right is better. Measured while training, on the machine named at the end.",
    )  # fmt: skip
    memory = _bars(
        results, looks, "memory", "Peak memory", lambda run: run.peak_memory_bytes, 2.0**20,
        "MB", "Left is better. The largest memory of the process while training and evaluating.",
    )  # fmt: skip
    return [figure for figure in (speed, memory) if not figure.empty]


def _bars(
    results: Results, looks: Looks, key: str, title: str, of: Callable[[Evaluation], float | None],
    unit: float, label: str, caption: str,
) -> Figure:  # fmt: skip
    arms = {arm.label: arm for arm in results.arms}
    order = [arms[row.label] for row in ranking(results)][::-1]
    data = [trace for arm in order for trace in _bar(arm, looks[arm.label], of, unit)]
    return Figure(
        key,
        title,
        f"{caption} Bars are means, thin lines run from the lowest to the highest seed.",
        one_view(data),
        {"xaxis": axis(label, rangemode="tozero"), "yaxis": {"type": "category", "showgrid": False}},
        height=70 + ROW_HEIGHT * max(len(data), 2),
    )


def _bar(arm: ArmResults, style: Style, of: Callable[[Evaluation], float | None], unit: float) -> list[Trace]:
    values = [value / unit for value in arm.values(of).values()]
    if not values:
        return []
    mean, name = sum(values) / len(values), plot_text(arm.label)
    spread = {
        "type": "data",
        "symmetric": False,
        "array": [max(values) - mean],
        "arrayminus": [mean - min(values)],
    }
    return [
        {
            "type": "bar", "orientation": "h", "x": [short(mean)], "y": [name], "name": name,
            "meta": {"arm": arm.label}, "marker": {"color": style.color},
            "error_x": {**spread, "color": "var(--ink)", "thickness": 1, "width": 3},
            "text": [f"{mean:,.0f}"], "textposition": "inside", "insidetextanchor": "start",
            "insidetextfont": {"color": "var(--ground)"},
            "hovertemplate": "%{x:,.0f}<extra>%{y}</extra>",
        }
    ]  # fmt: skip


def task_figures(results: Results) -> list[Figure]:
    """One heatmap a task, encodings down and lengths across; with depths one for each encoding too."""
    out = []
    for task in results.tasks:
        overview = _task_figure(results, task)
        out += [overview] if overview is not None else []
        out += _depth_figures(results, task)
    return out


def _compared(results: Results, arm: ArmResults, task: str) -> list[Score]:
    """An arm's scores on a task, on the seeds that all arms have."""
    found = task_blocks(results)
    seeds = found.units if arm.label in found.means else arm.scores
    return [score for seed in seeds for score in arm.scores[seed] if score.task == task]


def _task_figure(results: Results, task: str) -> Figure | None:
    scored = {arm.label: found for arm in results.arms if (found := _compared(results, arm, task))}
    if not scored:
        return None
    every = [score for found in scored.values() for score in found]
    splits = list(dict.fromkeys(s.split for s in every))
    columns = sorted({(s.split, s.length) for s in every}, key=lambda c: (splits.index(c[0]), c[1]))
    lengths = [str(length) for _, length in columns]
    x = lengths if len(splits) == 1 else [[plot_text(split) for split, _ in columns], lengths]
    moving = scored_by(results, task)
    order = sorted(scored, key=lambda label: _mean(scored[label], moving) or 0.0)
    labels = [plot_text(label) for label in order]

    def view(kind: Kind) -> View:
        z = [
            [_mean([s for s in scored[n] if (s.split, s.length) == c], kind) for c in columns] for n in order
        ]
        return View(SCORED[kind], [_scores(z, x, labels)])

    kinds: list[Kind] = ["exact", "token"] if moving == "exact" else ["token", "exact"]
    return Figure(
        f"task-{task}",
        task,
        f"In percent, mean over seeds; columns are lengths. Ordered by {SCORED[moving]}, best on top. Look to "
        "the right, where samples are longer than in training.",
        [view(kind) for kind in kinds],
        {
            "xaxis": {"type": "category"}
            if len(splits) == 1
            else {"type": "multicategory", "tickangle": -90},
            "yaxis": {"type": "category"},
        },
        choose="Share of",
        wide=len(splits) > 1,
        height=110 + ROW_HEIGHT * max(len(order), 3),
    )


def _mean(scores: Sequence[Score], kind: Kind = "exact") -> float | None:
    values = [value for score in scores if (value := getattr(score, kind)) is not None]
    return short(sum(values) / len(values)) if values else None


def _scores(z: Sequence[Sequence[float | None]], x: Sequence[Any], y: Sequence[str]) -> Trace:
    """Scores from 0 to 1 on a fixed scale, with the numbers in the cells where they fit."""
    cells = [["" if v is None else f"{100 * v:.0f}" for v in row] for row in z]
    return heatmap(
        z, x, y, zmin=0, zmax=1, colorscale=SCORE_SCALE, showscale=False, text=cells,
        texttemplate="%{text}", textfont={"size": 11, "color": "var(--ink)"},
        hovertemplate="%{y}, %{x}: %{z:.2%}<extra></extra>",
    )  # fmt: skip


def _depth_figures(results: Results, task: str) -> list[Figure]:
    """Where in the text the thing to find was: depth down, length across."""
    out = []
    order = [row.label for row in ranking(results)]
    for arm in sorted(results.arms, key=lambda arm: order.index(arm.label)):
        scores = [s for s in _compared(results, arm, task) if s.depth is not None]
        if not scores:
            continue
        depths = sorted({s.depth for s in scores if s.depth is not None}, reverse=True)
        lengths = sorted({s.length for s in scores})
        z = [[_mean([s for s in scores if (s.depth, s.length) == (d, n)]) for n in lengths] for d in depths]
        out.append(
            Figure(
                f"depth-{task}-{arm.label}",
                f"{task}: {arm.label}",
                "",
                one_view([_scores(z, [str(n) for n in lengths], [f"{100 * d:.0f}%" for d in depths])]),
                {
                    "xaxis": axis("length", type="category"),
                    "yaxis": axis("depth", type="category"),
                },
                height=230,
            )
        )
    return out
