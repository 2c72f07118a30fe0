"""A figure as plain data: plotly traces and layout, drawn by the page's script.

Python builds no plotly objects: a trace is a dict of plotly.js, colours are CSS variables, and the script
adds fonts, grids and grounds that fit the theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .statistics import Blocks
from .stored import Curve
from .style import Looks, Style

Trace = dict[str, Any]


@dataclass(frozen=True)
class View:
    """One state of a figure; with several, the reader chooses (a layer, a head)."""

    label: str
    data: Sequence[Trace]


@dataclass(frozen=True)
class Figure:
    """What the page shows: a title, a drawing, and a caption that says what to look at."""

    key: str
    title: str
    caption: str
    views: Sequence[View]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 340
    choose: str = "Show"
    wide: bool = False

    @property
    def empty(self) -> bool:
        return not any(view.data for view in self.views)

    def payload(self) -> dict[str, Any]:
        """What the script reads."""
        return {"views": [{"data": list(view.data)} for view in self.views], "layout": dict(self.layout)}


def one_view(data: Iterable[Trace]) -> tuple[View, ...]:
    return (View("", list(data)),)


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def doubling_axis(title: str, top: float) -> dict[str, Any]:
    """A logarithmic axis from 1 with ticks at powers of two (of four, where there would be many)."""
    step = 1 if top <= 256 else 2
    ticks = [2**i for i in range(0, max(1, math.ceil(math.log2(max(top, 2)))) + 1, step)]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{t:,}" for t in ticks])


def decade_axis(title: str, values: Iterable[float | None]) -> dict[str, Any]:
    """A logarithmic axis with a few ticks at powers of ten."""
    known = [v for v in values if v is not None and v > 0] or [1.0]
    first, last = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    powers = range(first, last + 1, max(1, -(-(last - first) // 6)))
    names = [f"{10.0**k:g}" if -3 <= k <= 5 else f"10<sup>{k}</sup>" for k in powers]
    return axis(title, type="log", tickvals=[10.0**k for k in powers], ticktext=names)


def plot_text(text: str) -> str:
    """Text as plotly shows it unchanged: it reads tags, and of the named entities only a few."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(value: float) -> float:
    """Six digits: what a figure can show, a third of the bytes."""
    return float(f"{value:.6g}")


def curve(
    name: str, x: Sequence[float], y: Sequence[float | None], color: str, dash: str = "solid", **more: Any
) -> Trace:
    look = {"color": color, "dash": dash, "width": 2}
    found = {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": plot_text(name)}
    return found | {"line": look, "hovertemplate": "%{y:.4g}", **more}


def band(x: Sequence[float], low: Sequence[Any], high: Sequence[Any], style: Style, opacity: float) -> Trace:
    """A shaded area between two curves, without a name."""
    return {
        "type": "scatter", "mode": "lines", "x": [*x, *x[::-1]], "y": [*high, *low[::-1]], "hoverinfo": "skip",
        "showlegend": False, "fill": "toself", "fillcolor": style.faint(opacity),
        "line": {"width": 0, "color": style.faint(0)},
    }  # fmt: skip


def arm_curve(label: str, style: Style, x: Sequence[float], y: Iterable[float], markers: bool) -> Trace:
    """A curve that hides with its arm."""
    marker = {"color": style.color, "symbol": style.symbol, "size": 7}
    shown = {"mode": "lines+markers", "marker": marker} if markers else {}
    values = [short(v) for v in y]
    return curve(
        label, x, values, style.color, style.dash, meta={"arm": label}, hovertemplate="%{y:.4f}", **shown
    )


def mean_and_band(label: str, style: Style, curves: Iterable[Curve], markers: bool = False) -> list[Trace]:
    """The mean over seeds as a line; behind it the range from the lowest to the highest seed."""
    points: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve.items():
            points.setdefault(x, []).append(y)
    at = sorted(points)
    if not at:
        return []
    across, values = [short(v) for v in at], [points[v] for v in at]
    mean = arm_curve(label, style, across, (sum(ys) / len(ys) for ys in values), markers)
    if all(len(ys) == 1 for ys in values):
        return [mean]
    low, high = ([short(f(ys)) for ys in values] for f in (min, max))
    return [band(across, low, high, style, 0.16) | {"meta": {"arm": label}}, mean]


def gap_traces(found: Mapping[Any, Blocks], best: str, looks: Looks) -> list[Trace]:
    """Differences to one arm at each x, with their intervals."""
    out = []
    for label in dict.fromkeys(label for each in found.values() for label in each.means):
        gaps = {x: each.difference(label, best) for x, each in found.items() if label in each.means}
        trace = arm_curve(label, looks[label], list(gaps), (gap.mean for gap in gaps.values()), True)
        margins = [0.0 if gap.high is None else short(gap.high - gap.mean) for gap in gaps.values()]
        bars = {"type": "data", "array": margins, "color": looks[label].color, "thickness": 1.2}
        out.append(trace | ({"error_y": bars} if any(margins) else {}))
    return out


def heatmap(z: Sequence[Sequence[float | None]], x: Sequence[Any], y: Sequence[Any], **more: Any) -> Trace:
    return {"type": "heatmap", "z": z, "x": x, "y": y, "xgap": 1, "ygap": 1, "hoverongaps": False, **more}
