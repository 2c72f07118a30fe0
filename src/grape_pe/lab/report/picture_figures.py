"""The figures of one encoding's picture: bias, rotation, spectrum, gates, heatmap, singular values, reach."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .figure import Figure, Trace, View, axis, decade_axis, doubling_axis, heatmap, one_view, plot_text
from .scores import SCORE_SCALE
from .style import Style

#: exp(-8) is 0.0003: below this a token is as good as invisible
FLOOR = -8.0
RAMP = [[0.0, "var(--heat-0)"], [0.5, "var(--heat-1)"], [1.0, "var(--heat-2)"]]
#: heads and layers are named in the figure itself: they share the colour of their encoding
LEGEND = {"showlegend": True}
Picture = Mapping[str, Any]


def picture_figures(picture: Picture, style: Style, key: str) -> list[Figure]:
    """Every figure the picture has data for; `key` makes their names unique on the page."""
    made = [_bias(picture, style, key), _kernel(picture, style, key), _spectrum(picture, style, key)]
    made += [_gates(picture, style, key), _heatmaps(picture, key), _singular(picture, style, key)]
    made += [_reach(picture, key)]
    return [figure for figure in made if figure is not None and not figure.empty]


def check_picture(picture: Picture) -> None:
    """Raise KeyError, TypeError, ValueError, IndexError or AttributeError if it cannot be drawn."""
    figures = picture_figures(picture, Style(0, "solid", "circle"), "check")
    json.dumps([figure.payload() for figure in figures], allow_nan=False)
    for text in (picture["singular_about"], picture.get("breaks_relative_law") or ""):
        text.strip()
    len(picture["singular"])


def _layers(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    return list(dict.fromkeys(entry["layer"] for entry in entries))


def _name(head: int | None) -> str:
    return "all heads" if head is None else f"head {head + 1}"


def _shade(style: Style, index: int, count: int) -> str:
    """Heads and layers share the encoding's colour, from faint to full."""
    return style.faint(round(0.5 + 0.5 * index / (count - 1), 2)) if count > 1 else style.color


def _lines(entries: Sequence[Mapping[str, Any]], at: Sequence[int], style: Style) -> list[Trace]:
    out = []
    for index, entry in enumerate(entries):
        color = _shade(style, index, len(entries))
        if "low" in entry and len(entries) <= 8:
            out.append(_band(entry, at, style))
        out.append(_line(entry["mean"], at, color, _name(entry["head"])))
    return out


def _line(y: Sequence[float | None], x: Sequence[float], color: str, name: str, **more: Any) -> Trace:
    return {
        "type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": name,
        "line": {"color": color, "width": 1.8, **more}, "hovertemplate": "%{y:.3g}",
    }  # fmt: skip


def _band(entry: Mapping[str, Any], at: Sequence[int], style: Style) -> Trace:
    x = list(at)
    return {
        "type": "scatter", "mode": "lines", "x": x + x[::-1], "y": entry["high"] + entry["low"][::-1],
        "fill": "toself", "fillcolor": style.faint(0.07), "line": {"width": 0, "color": style.faint(0)},
        "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def _by_layer(entries: Sequence[Mapping[str, Any]], at: Sequence[int], style: Style) -> list[View]:
    return [
        View(f"layer {layer + 1}", _lines([e for e in entries if e["layer"] == layer], at, style))
        for layer in _layers(entries)
    ]


def _bias(picture: Picture, style: Style, key: str) -> Figure | None:
    entries = picture["bias"]
    known = [v for e in entries for v in e["mean"] if v is not None]
    top, bottom = max(known, default=0.0), min(known, default=-1.0)
    return Figure(
        f"{key}-bias",
        "Bias against distance",
        "What is added to the logit of a token so many tokens back: a line for each head, the mean over the "
        "sample text, and a band from its 5% to its 95% quantile where content decides. At −0.7 a token's "
        "weight is halved; below −7 it is as good as gone.",
        _by_layer(entries, picture["distances"], style),
        {
            "xaxis": doubling_axis("distance (tokens)", picture["tokens"]),
            **LEGEND,
            "yaxis": axis("bias", range=[max(FLOOR, 1.08 * bottom), max(0.3, 1.08 * min(top, 8.0))]),
        },
    )


def _kernel(picture: Picture, style: Style, key: str) -> Figure | None:
    return Figure(
        f"{key}-kernel",
        "Rotation against distance",
        "How much of a match survives the rotation: the mean score of a vector with itself so many tokens "
        "away, 1 at distance 0. It falls as fast planes fall out of step, and swings where few are left.",
        _by_layer(picture["kernel"], picture.get("kernel_distances", picture["distances"]), style),
        {
            "xaxis": doubling_axis("distance (tokens)", picture["tokens"]),
            "yaxis": axis("tr G / D", range=[-0.35, 1.05]),
            **LEGEND,
        },
    )


def _spectrum(picture: Picture, style: Style, key: str) -> Figure | None:
    entries = picture["spectrum"]
    data: list[Trace] = []
    if entries and "initial" in entries[0]:
        data.append(
            _line(
                _waves(entries[0]["initial"]),
                _planes(entries[0]["initial"]),
                "var(--muted)",
                "initial",
                dash="dot",
            )
        )
    for index, entry in enumerate(entries):
        name = f"layer {entry['layer'] + 1}" + ("" if entry["head"] is None else f", {_name(entry['head'])}")
        trace = _line(_waves(entry["now"]), _planes(entry["now"]), _shade(style, index, len(entries)), name)
        data.append(
            {**trace, "mode": "lines+markers", "marker": {"size": 4, "color": trace["line"]["color"]}}
        )
    waves = [wave for trace in data for wave in trace["y"]]
    learned = bool(data) and "initial" in entries[0]
    return Figure(
        f"{key}-spectrum",
        "Spectrum",
        "Tokens for one full turn of each plane. "
        + ("The dotted line is where learning began; look for planes that left it." if learned else
           "Short wavelengths tell neighbours apart, long ones carry coarse position."),
        one_view(data),
        {"xaxis": axis("plane"), "yaxis": decade_axis("wavelength (tokens)", waves), **LEGEND},
    )  # fmt: skip


def _waves(frequencies: Sequence[float | None]) -> list[float | None]:
    return [float(f"{2 * math.pi / f:.5g}") if f else None for f in frequencies]


def _planes(values: Sequence[float | None]) -> list[int]:
    return list(range(1, len(values) + 1))


def _gates(picture: Picture, style: Style, key: str) -> Figure | None:
    views = [View(f"layer {e['layer'] + 1}: {e['name']}", [_boxes(e, style)]) for e in picture["gates"]]
    return Figure(
        f"{key}-gates",
        "Gates",
        "What content decides, over the sample text: the box holds the middle half, whiskers run from 5% to "
        "95%. A flat box means the gate ignores the text; a long one means that it chooses.",
        views,
        {"xaxis": axis("", type="category"), "yaxis": axis("gate")},
        choose="Gate",
    )


def _boxes(entry: Mapping[str, Any], style: Style) -> Trace:
    low, q1, median, q3, high = (list(column) for column in zip(*entry["quantiles"], strict=True))
    return {
        "type": "box", "x": [_name(head) for head in entry["heads"]], "lowerfence": low, "q1": q1,
        "median": median, "q3": q3, "upperfence": high, "name": plot_text(entry["name"]),
        "line": {"color": style.color, "width": 1.5}, "fillcolor": style.faint(0.2),
        "hoverinfo": "y",
    }  # fmt: skip


def _heatmaps(picture: Picture, key: str) -> Figure | None:
    biased = picture["heatmap_of"] == "bias"
    words = [_word(word) for word in picture["words"]]
    what = "bias" if biased else "attention weight"
    views = [
        View(f"layer {e['layer'] + 1}, {_name(e['head'])}", [_triangle(e["rows"], words, biased)])
        for e in picture["heatmaps"]
    ]
    ticks = {
        "tickvals": list(range(len(words))),
        "ticktext": words,
        "tickfont": {"size": 9},
        "showgrid": False,
    }
    return Figure(
        f"{key}-heatmap",
        "Bias on a sample text" if biased else "Attention on a sample text",
        f"Rows are the reading token, columns the tokens it can see; the stronger the colour, the "
        f"{'less is taken away' if biased else 'more it looks there'}. "
        + ("Stripes that follow words and not only the diagonal are the work of content." if biased else
           "This encoding adds no bias, so the attention weights themselves are shown."),
        views,
        {
            "xaxis": {**ticks, "tickangle": -90, "side": "bottom"},
            "yaxis": {**ticks, "autorange": "reversed"},
            "meta": {"unit": what},
        },
        height=430,
        choose="Head",
    )  # fmt: skip


def _word(word: str) -> str:
    shown = word.replace("\n", "⏎").replace("\t", "⇥").strip() or "␣"
    return plot_text(shown[:10])


def _triangle(rows: Sequence[Sequence[float | None]], words: Sequence[str], biased: bool) -> Trace:
    values = [v for row in rows for v in row if v is not None]
    low = max(FLOOR, min(values, default=0.0)) if biased else 0.0
    high = max(values, default=1.0)
    places = list(range(len(words)))
    return heatmap(
        rows, places, places, zmin=low, zmax=max(high, low + 1e-3), colorscale=RAMP,
        colorbar={"thickness": 10, "outlinewidth": 0, "len": 0.9},
        hovertemplate="%{y} → %{x}: %{z:.3g}<extra></extra>", xgap=0, ygap=0,
    )  # fmt: skip


def _singular(picture: Picture, style: Style, key: str) -> Figure | None:
    at, entries = picture["distances"], picture["singular"]
    seen = [v for e in entries for v in (*e["larger"], *e["smaller"])]
    views = []
    for layer in _layers(entries):
        mine = [e for e in entries if e["layer"] == layer]
        data: list[Trace] = []
        for index, entry in enumerate(mine):
            color = _shade(style, index, len(mine))
            data.append(_line(entry["larger"], at, color, _name(entry["head"])))
            small = _line(entry["smaller"], at, color, f"{_name(entry['head'])}, smallest", dash="dot")
            data.append({**small, "showlegend": False})
        views.append(View(f"layer {layer + 1}", data))
    return Figure(
        f"{key}-singular",
        "Singular values of the action",
        "The largest (full) and smallest (dotted) singular value over a distance, "
        f"{picture['singular_about']}.{_cancels(picture)}",
        views,
        {
            "xaxis": doubling_axis("distance (tokens)", picture["tokens"]),
            "yaxis": decade_axis("singular value", seen),
            **LEGEND,
        },
    )


def _cancels(picture: Picture) -> str:
    if "path" in picture["encoding"].split("+"):
        return " Below 1 the path forgets."
    return (
        " They stretch the lifted coordinates only: query and key move by G and its inverse transpose, and "
        "in the score all of it cancels but the bias."
    )


def _reach(picture: Picture, key: str) -> Figure | None:
    entries = picture["reach"]
    layers = _layers(entries)
    heads = list(dict.fromkeys(e["head"] for e in entries))
    found = {(e["layer"], e["head"]): e["half"] for e in entries}
    z = [[math.log2(1 + found[layer, head]) for head in heads] for layer in layers[::-1]]
    cells = [[f"{found[layer, head]:.0f}" for head in heads] for layer in layers[::-1]]
    trace = heatmap(
        z, [str(head + 1) for head in heads], [str(layer + 1) for layer in layers[::-1]], text=cells,
        texttemplate="%{text}", textfont={"color": "var(--ink)"}, colorscale=SCORE_SCALE, showscale=False,
        zmin=0, zmax=math.log2(picture["tokens"]),
        hovertemplate="layer %{y}, head %{x}: %{text} tokens<extra></extra>",
    )  # fmt: skip
    return Figure(
        f"{key}-reach",
        "How far each head looks",
        f"Half of a head's attention lies within so many tokens (median over the later half of a text of "
        f"{picture['tokens']}). Short numbers are local heads.",
        one_view([trace]),
        {"xaxis": axis("head", type="category"), "yaxis": axis("layer", type="category")},
        height=130 + 34 * len(layers),
    )
