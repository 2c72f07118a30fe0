"""Figures of loss: while training, by budget, by position, and beyond the training length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .figure import Figure, Trace, View, axis, doubling_axis, gap_traces, mean_and_band, one_view
from .ranking import budget_blocks, length_blocks, loss_blocks, text_blocks
from .results import LanguageRun, Results
from .statistics import Blocks
from .stored import Curve, Evaluation, curve
from .style import Style
from .tables import short_count

Looks = Mapping[str, Style]
#: points of a training curve; more would not be seen
POINTS = 160
#: losses this far above the best are drawn outside the frame, so that the others can be told apart
HEADROOM = 2.0


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
        runs = [of(arm.language[seed]) for seed in seeds]
        out += mean_and_band(arm.label, looks[arm.label], runs, markers)
    return out


def _evaluated(of: Callable[[Evaluation], Curve]) -> Callable[[LanguageRun], Curve]:
    return lambda run: {} if run.evaluation is None else of(run.evaluation)


def budget_figures(results: Results, looks: Looks) -> list[Figure]:
    """Loss against tokens, and how far each arm is behind the one that is best in the end."""
    found = budget_blocks(results)
    if not found:
        return []
    ticks = {"tickvals": list(found), "ticktext": [short_count(tokens) for tokens in found]}
    across = axis("tokens trained on", type="log", **ticks)
    data = _traces(
        results, looks, _evaluated(lambda run: curve((b.tokens, b.loss) for b in run.budgets)), True
    )
    best = list(found.values())[-1].best
    return [
        Figure(
            "budgets",
            "Loss by tokens trained on",
            "Validation loss of a model trained on so many tokens, its learning rate brought down to the end each "
            "time. Lines are means over seeds, bands run from the lowest to the highest seed.",
            one_view(data),
            {"xaxis": across, "yaxis": axis("loss (nats a token)", **_frame(data))},
        ),
        Figure(
            "budget-gaps",
            f"Behind {best}, by tokens trained on",
            "Differences of runs of the same seed. Bars: 95% intervals over seeds, simultaneous over all pairs of "
            "encodings at one budget; one that stays off zero is beyond chance. Whether a gap closes is judged on its "
            "change within seeds (last column of the table), not by comparing bars.",
            one_view(gap_traces(found, best, looks)),
            {"xaxis": across, "yaxis": axis("loss difference", zeroline=True, zerolinecolor="var(--muted)")},
        ),
    ]


def training(results: Results, looks: Looks) -> Figure:
    runs = [run for arm in results.arms for run in arm.language.values()]
    last = max((x for run in runs for x in run.train_curve), default=0)
    bin_width = max(1.0, last / POINTS)
    data = _traces(results, looks, lambda run: _binned(run.train_curve, bin_width))
    return Figure(
        "training",
        "Training loss",
        "Lines are means over seeds, bands run from the lowest to the highest seed. A seed moves all "
        "encodings together, so bands may overlap where a difference is beyond chance; the table says where.",
        one_view(data),
        {"xaxis": axis("step"), "yaxis": axis("loss (nats a token)", **_frame(data))},
    )


def _binned(curve: Curve, width: float) -> Curve:
    bins: dict[float, list[float]] = {}
    for x, y in curve.items():
        bins.setdefault((x // width + 0.5) * width, []).append(y)
    return {x: sum(ys) / len(ys) for x, ys in bins.items()}


def validation(results: Results, looks: Looks) -> Figure:
    data = _traces(results, looks, lambda run: run.validation_curve, markers=True)
    return Figure(
        "validation",
        "Validation loss",
        "The same fixed validation text for every run. The end of each curve is what the ranking uses.",
        one_view(data),
        {"xaxis": axis("step"), "yaxis": axis("loss (nats a token)", **_frame(data))},
    )


def by_position(results: Results, looks: Looks) -> Figure:
    points = _evaluated(lambda run: curve(zip(run.by_position.position, run.by_position.loss, strict=False)))
    data = _traces(results, looks, points)
    layout: dict[str, Any] = {
        "xaxis": doubling_axis("position in the text", max((x for t in data for x in t["x"]), default=1)),
        "yaxis": axis("loss (nats a token)", **_frame(data)),
    }
    if results.train_length:
        layout |= _mark(results.train_length, "training length")
    return Figure(
        "by-position",
        "Loss by position",
        "How well the token at each position is predicted. A falling curve uses its context; one that turns "
        f"up to the right of the training length does not carry over to longer texts.{_outside(data)}",
        one_view(data),
        layout,
        wide=True,
    )


def _mark(x: float, text: str) -> dict[str, Any]:
    """A thin line at x. (Annotations on a log axis are placed at log10 x by plotly, shapes at x.)"""
    line = {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    note = {"x": math.log10(x), "yref": "paper", "y": 1, "text": text, "showarrow": False, "xanchor": "right"}
    return {
        "shapes": [{**line, "line": {"color": "var(--muted)", "dash": "dot", "width": 1}}],
        "annotations": [
            {**note, "yanchor": "top", "xshift": -4, "font": {"color": "var(--muted)", "size": 11}}
        ],
    }


def extrapolation(results: Results, looks: Looks, windowed: bool) -> Figure:
    base = results.train_length or 1
    points = _evaluated(
        lambda run: curve(
            (e.length / base, e.loss) for e in run.extrapolation if (e.window is not None) == windowed
        )
    )
    data = _traces(results, looks, points, markers=True)
    ticks = [length / base for length in results.lengths(windowed)]
    how = "with a window of the training length" if windowed else "full attention"
    look = (
        "Attention reaches back one training length only, so no distance is new. Compare with full "
        "attention: the difference is what unknown distances cost."
        if windowed
        else "Flat or falling is good: the encoding copes with distances it was never trained on."
    )
    return Figure(
        f"extrapolation-{'window' if windowed else 'full'}",
        f"Longer texts, {how}",
        f"Loss on texts of 1 to {ticks[-1]:g} times the training length. {look}{_outside(data)}"
        if ticks
        else "",
        one_view(data),
        {"xaxis": _times(ticks), "yaxis": axis("loss (nats a token)", **_frame(data))},
    )


def _times(ticks: list[float]) -> dict[str, Any]:
    text = [f"{tick:g}×" for tick in ticks]
    return axis("length / training length", type="log", tickvals=ticks, ticktext=text)


def behind_by_length(results: Results, looks: Looks) -> Figure:
    """Differences to the best arm at each length, with the two kinds of interval."""
    base, lengths = results.train_length or 1, results.lengths()
    ranked = loss_blocks(results)
    best = ranked.best if ranked.means else ""
    over: dict[str, Callable[[Results, int], Blocks]] = {
        "seeds: other training runs, the same text": length_blocks,
        "text: the same models, other text": text_blocks,
    }
    views = []
    for name, compared in over.items():
        found = {length / base: compared(results, length) for length in lengths}
        views.append(
            View(name, gap_traces({x: each for x, each in found.items() if best in each.means}, best, looks))
        )
    data = [trace for view in views for trace in view.data]
    return Figure(
        "behind-by-length",
        f"Behind {best}, by length",
        "Full attention. 95% intervals, simultaneous over all pairs of encodings at one length. Those over seeds "
        "pair runs of a seed, those over text pair stretches of text; each covers its own uncertainty only."
        f"{_outside(data)}",
        [view for view in views if view.data],
        {
            "xaxis": _times([length / base for length in lengths]),
            "yaxis": axis("loss difference", zeroline=True, zerolinecolor="var(--muted)", **_frame(data)),
        },
        choose="Intervals over",
        wide=True,
    )


def _lines(data: list[Trace]) -> list[list[float]]:
    return [trace["y"] for trace in data if "name" in trace and trace["y"]]


def _frame(data: list[Trace]) -> dict[str, Any]:
    """A range that keeps the best curves readable when others leave it far above."""
    lines = _lines(data)
    if not lines or max(map(max, lines)) <= _ceiling(lines):
        return {}
    low = min(map(min, lines))
    return {"range": [low - 0.05 * (_ceiling(lines) - low), _ceiling(lines)]}


def _ceiling(lines: list[list[float]]) -> float:
    """Above the best curve's start and above half the curves' ends, with headroom."""
    ends = sorted(line[-1] for line in lines)
    return max(ends[len(ends) // 2], min(map(min, lines))) + HEADROOM


def _outside(data: list[Trace]) -> str:
    lines = _lines(data)
    if not lines:
        return ""
    gone = [t["meta"]["arm"] for t in data if "name" in t and t["y"] and max(t["y"]) > _ceiling(lines)]
    return f" {', '.join(gone)} leave the frame; double-click shows all." if gone else ""
