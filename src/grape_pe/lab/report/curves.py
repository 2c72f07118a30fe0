"""Figures of loss: while training, by position, and beyond the training length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .figure import Curve, Figure, Trace, axis, doubling_axis, mean_and_band, one_view, over_seeds
from .results import LanguageRun, Results
from .style import Style

Looks = Mapping[str, Style]
#: points of a training curve; more would not be seen
POINTS = 160
#: losses this far above the best are drawn outside the frame, so that the others can be told apart
HEADROOM = 2.0


def loss_figures(results: Results, looks: Looks) -> list[Figure]:
    """Every figure of loss that has data."""
    made = [training(results, looks), validation(results, looks), by_position(results, looks)]
    made += [extrapolation(results, looks, windowed) for windowed in (False, True)]
    return [figure for figure in made if not figure.empty]


def _traces(
    results: Results, looks: Looks, of: Callable[[LanguageRun], Curve], markers: bool = False
) -> list[Trace]:
    return [
        trace
        for arm in results.arms
        for trace in mean_and_band(arm, looks[arm.label], [of(run) for run in arm.language.values()], markers)
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
    data = _traces(results, looks, lambda run: run.by_position)
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

    def curve(run: LanguageRun) -> Curve:
        found = [s for s in run.extrapolation if (s.window is not None) == windowed and s.loss is not None]
        return {s.length / base: s.loss for s in found if s.loss is not None}

    data = _traces(results, looks, curve, markers=True)
    ticks = list(over_seeds(curve(run) for arm in results.arms for run in arm.language.values()))
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
        {
            "xaxis": axis(
                "length / training length", type="log", tickvals=ticks, ticktext=[f"{t:g}×" for t in ticks]
            ),
            "yaxis": axis("loss (nats a token)", **_frame(data)),
        },
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
