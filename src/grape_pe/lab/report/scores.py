"""Figures of scores: the ranking with its intervals, tasks, speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .figure import Figure, Trace, View, axis, heatmap, one_view, plot_text, short
from .ranking import Kind, Row, in_order, loss_blocks, mean_score, ranking, scored_by, task_blocks
from .results import ArmResults, Results
from .stored import Evaluation, Score
from .style import Looks, Style
from .tables import SCORED

SCORE_SCALE = [[0.0, "var(--score-0)"], [0.5, "var(--score-1)"], [1.0, "var(--score-2)"]]
ROW_HEIGHT, MB = 26, 2**-20
BAND = (
    " Means in the shaded band do not differ from the best beyond chance. Single seeds vary more than its width, "
    "because what a seed changes for all encodings is taken out."
)


def ranking_figure(results: Results, looks: Looks) -> Figure:
    """Validation losses as points: each seed, the mean, and a band for what is not beyond chance."""
    found = loss_blocks(results)
    rows = [row for row in ranking(results) if row.val_loss is not None][::-1]
    labels = [plot_text(row.label) for row in rows]
    layout: dict[str, Any] = {
        "xaxis": axis("loss (nats a token)", **_span(rows)),
        "yaxis": {"type": "category", "categoryarray": labels, "showgrid": True},
    }
    note = " One seed each, so there is no interval: the order may be chance."
    if found.margin is not None:
        note, low = BAND, found.means[found.best]
        place = {"x0": low, "x1": low + found.margin, "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
        look = {"type": "rect", "fillcolor": "var(--muted)@0.13", "line": {"width": 0}}
        layout["shapes"] = [{**place, **look}]
    caption = f"Left is better. Small marks are seeds, the large one their mean.{note}"
    data = [trace for row in rows for trace in _ranked(row, looks[row.label])]
    return Figure("ranking", "Validation loss", caption, one_view(data), layout, height=_height(len(rows)))


def _height(rows: int) -> int:
    return 70 + ROW_HEIGHT * max(rows, 2)


def _span(rows: Sequence[Row]) -> dict[str, list[float]]:
    """All seeds in the frame; wide intervals may leave it."""
    losses = [loss for row in rows for loss in row.losses.values()]
    if not losses:
        return {}
    low, high = min(losses), max(losses)
    margin = 0.35 * (high - low) or 0.01 * abs(high) or 1.0
    return {"range": [low - margin, high + margin]}


def _ranked(row: Row, style: Style) -> list[Trace]:
    assert row.val_loss is not None
    name = plot_text(row.label)

    def points(losses: Sequence[float], what: str, marker: dict[str, Any]) -> Trace:
        hover = f"%{{x:.4f}}<extra>%{{y}}: {what}</extra>"
        place = {"x": [short(loss) for loss in losses], "y": [name] * len(losses)}
        look = {"type": "scatter", "mode": "markers", "marker": marker, "hovertemplate": hover}
        return {**place, **look, "meta": {"arm": row.label}}

    mean = points([row.val_loss.mean], "mean", {"color": style.color, "symbol": style.symbol, "size": 11})
    thin = {"symbol": "line-ns", "size": 9, "line": {"color": style.color, "width": 1.5}}
    seeds = [points(list(row.losses.values()), "a seed", thin)] if row.val_loss.count > 1 else []
    return [*seeds, {**mean, "name": name}]


def cost_figures(results: Results, looks: Looks) -> list[Figure]:
    """Speed and memory, as bars in the order of the ranking."""

    def bars(
        key: str, title: str, label: str, caption: str, of: Callable[[Evaluation], float | None]
    ) -> Figure:
        measured = {arm.label: list(arm.values(of).values()) for arm in in_order(results)[::-1]}
        data = [_bar(name, looks[name], values) for name, values in measured.items() if values]
        layout = {"xaxis": axis(label, rangemode="tozero"), "yaxis": {"type": "category", "showgrid": False}}
        how = f"{caption} Bars are means, thin lines run from the lowest to the highest seed."
        return Figure(key, title, how, one_view(data), layout, height=_height(len(data)))

    speed = "Right is better. Measured while training, on the machine named at the end."
    memory = "Left is better. The largest memory of the process while training and evaluating."
    made = (
        bars("speed", "Training speed", "tokens a second", speed, lambda run: run.tokens_per_second),
        bars("memory", "Peak memory", "MB", memory, lambda run: run.peak_memory_bytes and run.peak_memory_bytes * MB),
    )  # fmt: skip
    return [figure for figure in made if not figure.empty]


def _bar(label: str, style: Style, values: Sequence[float]) -> Trace:
    mean, name = sum(values) / len(values), plot_text(label)
    return {
        "type": "bar", "orientation": "h", "x": [short(mean)], "y": [name], "name": name,
        "meta": {"arm": label}, "marker": {"color": style.color}, "hovertemplate": "%{x:,.0f}<extra>%{y}</extra>",
        "error_x": {"type": "data", "symmetric": False, "array": [max(values) - mean],
                    "arrayminus": [mean - min(values)], "color": "var(--ink)", "thickness": 1, "width": 3},
        "text": [f"{mean:,.0f}"], "textposition": "inside", "insidetextanchor": "start",
        "insidetextfont": {"color": "var(--ground)"},
    }  # fmt: skip


def task_figures(results: Results) -> tuple[list[Figure], list[Figure]]:
    """One heatmap a task, encodings down and lengths across; and small ones by depth for each encoding."""
    overviews, by_depth = [], []
    for task in results.tasks:
        scored = {arm.label: found for arm in in_order(results) if (found := _compared(results, arm, task))}
        overviews += [_task_figure(results, task, scored)] if scored else []
        deep = {label: [s for s in found if s.depth is not None] for label, found in scored.items()}
        by_depth += [_depth_figure(task, label, found) for label, found in deep.items() if found]
    return overviews, by_depth


def _compared(results: Results, arm: ArmResults, task: str) -> list[Score]:
    """An arm's scores on a task, on the seeds that all arms have."""
    found = task_blocks(results)
    scores = arm.scores(task)
    seeds = found.units if arm.label in found.means else scores
    return [score for seed in seeds for score in scores.get(seed, ())]


def _task_figure(results: Results, task: str, scored: dict[str, list[Score]]) -> Figure:
    every = [score for found in scored.values() for score in found]
    splits = list(dict.fromkeys(s.split for s in every))
    columns = sorted({(s.split, s.length) for s in every}, key=lambda c: (splits.index(c[0]), c[1]))
    lengths = [str(length) for _, length in columns]
    x = lengths if len(splits) == 1 else [[plot_text(split) for split, _ in columns], lengths]
    moving = scored_by(results, task)
    labels = [arm.label for arm in results.arms if arm.label in scored]
    order = sorted(labels, key=lambda label: mean_score(scored[label], moving) or 0.0)

    def view(kind: Kind) -> View:
        cells = [[[s for s in scored[n] if (s.split, s.length) == c] for c in columns] for n in order]
        return View(SCORED[kind], [_scores(cells, kind, x, [plot_text(label) for label in order])])

    kinds: list[Kind] = ["exact", "token"] if moving == "exact" else ["token", "exact"]
    many = {"type": "multicategory", "tickangle": -90}
    return Figure(
        f"task-{task}", task,
        f"In percent, mean over seeds; columns are lengths, on the right longer than in training. Ordered by "
        f"{SCORED[moving]}, best on top.",
        [view(kind) for kind in kinds],
        {"xaxis": {"type": "category"} if len(splits) == 1 else many, "yaxis": {"type": "category"}},
        choose="Share of", wide=len(splits) > 1, height=110 + ROW_HEIGHT * max(len(order), 3),
    )  # fmt: skip


def _scores(
    cells: Sequence[Sequence[Sequence[Score]]], kind: Kind, x: Sequence[Any], y: Sequence[str]
) -> Trace:
    """Mean scores from 0 to 1 on a fixed scale, with the numbers in the cells where they fit."""
    means = [[mean_score(scores, kind) for scores in row] for row in cells]
    return heatmap(
        [[None if v is None else short(v) for v in row] for row in means], x, y,
        text=[["" if v is None else f"{100 * short(v):.0f}" for v in row] for row in means],
        zmin=0, zmax=1, colorscale=SCORE_SCALE, showscale=False, texttemplate="%{text}",
        textfont={"size": 11, "color": "var(--ink)"}, hovertemplate="%{y}, %{x}: %{z:.2%}<extra></extra>",
    )  # fmt: skip


def _depth_figure(task: str, label: str, scores: Sequence[Score]) -> Figure:
    """Scores by depth (down) and length (across)."""
    depths = sorted({s.depth for s in scores if s.depth is not None}, reverse=True)
    lengths = sorted({s.length for s in scores})
    cells = [[[s for s in scores if (s.depth, s.length) == (d, n)] for n in lengths] for d in depths]
    trace = _scores(cells, "exact", [str(n) for n in lengths], [f"{100 * d:.0f}%" for d in depths])
    layout = {"xaxis": axis("length", type="category"), "yaxis": axis("depth", type="category")}
    return Figure(
        f"depth-{task}-{label}", f"{task}: {label}", "", one_view([trace]), layout, height=230
    )  # fmt: skip
