"""Figures of loss: while training, by budget, by position, and beyond the training length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .cells import short_count
from .figure import Figure, Trace, View, axis, doubling_axis, gap_traces, mean_and_band, one_view
from .ranking import budget_blocks, length_blocks, loss_blocks, text_blocks
from .results import LanguageRun, Results
from .stored import Curve, Evaluation, curve
from .style import Looks

#: points of a training curve; more would not be seen
POINTS = 160
#: losses this far above the best are drawn outside the frame, so that the others can be told apart
HEADROOM = 2.0
LOSS = axis("loss (nats a token)")
GAP = axis("loss difference", zeroline=True, zerolinecolor="var(--muted)")
SEEDS = "Lines are means over seeds, bands run from the lowest to the highest seed."


def loss_figures(results: Results, looks: Looks) -> list[Figure]:
    """Every figure of loss that has data."""
    made = [*budget_figures(results, looks), training(results, looks), validation(results, looks)]
    made += [by_position(results, looks)]
    made += [extrapolation(results, looks, windowed) for windowed in (False, True)]
    made += [behind_by_length(results, looks)]
    return [figure for figure in made if not figure.empty]


def _traces(
    results: Results, looks: Looks, of: Callable[[LanguageRun], Curve], markers: bool = False
) -> list[Trace]:
    """Means over the seeds that all compared arms have; other arms over their own."""
    found = loss_blocks(results)
    out = []
    for arm in results.arms:
        seeds = found.units if arm.label in found.means else arm.language
        out += mean_and_band(arm.label, looks[arm.label], [of(arm.language[seed]) for seed in seeds], markers)
    return out


def _evaluated(of: Callable[[Evaluation], Curve]) -> Callable[[LanguageRun], Curve]:
    return lambda run: {} if run.evaluation is None else of(run.evaluation)


def _figure(
    key: str, title: str, caption: str, views: Sequence[View], across: dict[str, Any],
    down: dict[str, Any] = LOSS, mark: dict[str, Any] | None = None, **more: Any,
) -> Figure:  # fmt: skip
    """A figure of losses that names the arms that leave its frame."""
    data = [trace for view in views for trace in view.data]
    layout = {"xaxis": across, "yaxis": {**down, **_frame(data)}, **(mark or {})}
    return Figure(key, title, caption + _outside(data), views, layout, **more)


def budget_figures(results: Results, looks: Looks) -> list[Figure]:
    """Loss against tokens, and how far each arm is behind the one that is best in the end."""
    found = budget_blocks(results)
    if not found:
        return []
    names = [short_count(tokens) for tokens in found]
    across = axis("tokens trained on", type="log", tickvals=list(found), ticktext=names)
    points = _evaluated(lambda run: curve((b.tokens, b.loss) for b in run.budgets))
    best = list(found.values())[-1].best
    losses = _figure(
        "budgets", "Loss by tokens trained on",
        "Validation loss of a model trained on this many tokens, its learning rate decayed to the end each "
        f"time. {SEEDS}",
        one_view(_traces(results, looks, points, markers=True)), across,
    )  # fmt: skip
    gaps = _figure(
        "budget-gaps", f"Behind {best}, by tokens trained on",
        "Differences of runs of the same seed. Bars: 95% intervals over seeds, simultaneous over all pairs of "
        "encodings at one budget; one that stays off zero is beyond chance. Whether a gap closes is judged on its "
        "change within seeds (last column of the table), not by comparing bars.",
        one_view(gap_traces(found, best, looks)), across, GAP,
    )  # fmt: skip
    return [losses, gaps]


def training(results: Results, looks: Looks) -> Figure:
    runs = [run for arm in results.arms for run in arm.language.values()]
    bin_width = max(1.0, max((x for run in runs for x in run.train_curve), default=0) / POINTS)
    caption = (
        f"{SEEDS} A seed moves all encodings together, so bands may overlap where a difference is beyond chance; "
        "the table says where."
    )
    data = _traces(results, looks, lambda run: _binned(run.train_curve, bin_width))
    return _figure("training", "Training loss", caption, one_view(data), axis("step"))


def _binned(curve: Curve, width: float) -> Curve:
    bins: dict[float, list[float]] = {}
    for x, y in curve.items():
        bins.setdefault((x // width + 0.5) * width, []).append(y)
    return {x: sum(ys) / len(ys) for x, ys in bins.items()}


def validation(results: Results, looks: Looks) -> Figure:
    caption = (
        "The same fixed validation text for every run. grape compare ranks by a larger sample, read at the end of "
        "each run."
    )
    data = _traces(results, looks, lambda run: run.validation_curve, markers=True)
    return _figure("validation", "Validation loss while training", caption, one_view(data), axis("step"))


def by_position(results: Results, looks: Looks) -> Figure:
    points = _evaluated(lambda run: curve(zip(run.by_position.position, run.by_position.loss, strict=False)))
    data = _traces(results, looks, points)
    across = doubling_axis("position in the text", max((x for t in data for x in t["x"]), default=1))
    caption = (
        "Mean loss of the token at each position. Where the curve falls, more context helps. Where it rises beyond "
        "the training length, the model does not generalize to longer texts."
    )
    mark = _mark(results.train_length, "training length")
    return _figure("by-position", "Loss by position", caption, one_view(data), across, mark=mark, wide=True)


def _mark(x: float | None, text: str) -> dict[str, Any]:
    """A thin line at x. (Annotations on a log axis are placed at log10 x by plotly, shapes at x.)"""
    if not x:
        return {}
    muted = {"color": "var(--muted)"}
    line = {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    note = {"x": math.log10(x), "yref": "paper", "y": 1, "text": text, "showarrow": False, "xanchor": "right"}
    return {
        "shapes": [{**line, "line": {**muted, "dash": "dot", "width": 1}}],
        "annotations": [{**note, "yanchor": "top", "xshift": -4, "font": {**muted, "size": 11}}],
    }


def extrapolation(results: Results, looks: Looks, windowed: bool) -> Figure:
    base, ticks = results.train_length or 1, _multiples(results, windowed)
    points = _evaluated(
        lambda run: curve(
            (e.length / base, e.loss) for e in run.extrapolation if (e.window is not None) == windowed
        )
    )
    data = _traces(results, looks, points, markers=True)
    key, how, look = (
        ("window", "with a window of the training length",
         "Attention is limited to one training length, so all distances were seen in training. The difference to "
         "full attention is the cost of unseen distances.")
        if windowed
        else ("full", "full attention",
              "Flat or falling is good: the encoding generalizes to distances not seen in training.")
    )  # fmt: skip
    span = f"Loss on texts of 1 to {max(ticks, default=1):g} times the training length. {look}"
    return _figure(f"extrapolation-{key}", f"Longer texts, {how}", span, one_view(data), _times(ticks))


def _multiples(results: Results, windowed: bool = False) -> list[float]:
    return [length / (results.train_length or 1) for length in results.lengths(windowed)]


def _times(ticks: list[float]) -> dict[str, Any]:
    text = [f"{tick:g}×" for tick in ticks]
    return axis("length / training length", type="log", tickvals=ticks, ticktext=text)


def behind_by_length(results: Results, looks: Looks) -> Figure:
    """Differences to the best arm at each length, with the two kinds of interval."""
    best, times = next(iter(loss_blocks(results).order), ""), _multiples(results)
    views = []
    for name, compared in (
        ("seeds: other training runs, the same text", length_blocks),
        ("text: the same models, other text", text_blocks),
    ):
        found = dict(zip(times, (compared(results, length) for length in results.lengths()), strict=True))
        known = {x: each for x, each in found.items() if best in each.means}
        views += [View(name, gap_traces(known, best, looks))] if known else []
    return _figure(
        "behind-by-length", f"Behind {best}, by length",
        "Full attention. 95% intervals, simultaneous over all pairs of encodings at one length. Those over seeds "
        "pair runs of a seed, those over text pair stretches of text; each covers its own uncertainty only.",
        views, _times(times), GAP, choose="Intervals over", wide=True,
    )  # fmt: skip


def _frame(data: list[Trace]) -> dict[str, Any]:
    """A range that keeps the best curves readable when others leave it far above."""
    top, gone = _leaving(data)
    if not gone:
        return {}
    low = min(min(trace["y"]) for trace in data if "name" in trace and trace["y"])
    return {"range": [low - 0.05 * (top - low), top]}


def _leaving(data: list[Trace]) -> tuple[float, list[str]]:
    """The top of the frame, above half the curves' ends and the lowest loss, and the arms that go beyond it."""
    lines = [trace for trace in data if "name" in trace and trace["y"]]
    if not lines:
        return math.inf, []
    ends = sorted(trace["y"][-1] for trace in lines)
    top = max(ends[len(ends) // 2], min(min(trace["y"]) for trace in lines)) + HEADROOM
    return top, list(dict.fromkeys(trace["meta"]["arm"] for trace in lines if max(trace["y"]) > top))


def _outside(data: list[Trace]) -> str:
    """Names the arms that leave the frame, unless all do, as at the beginning of training."""
    _, gone = _leaving(data)
    leave = "leaves" if len(gone) == 1 else "leave"
    some = 0 < len(gone) < len({trace["meta"]["arm"] for trace in data})
    return f" {', '.join(gone)} {leave} the frame; double-click shows all." if some else ""
