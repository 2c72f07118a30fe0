"""The figures of one encoding's picture: bias, rotation, spectrum, gates, heatmap, singular values, reach."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .figure import (
    Figure,
    Trace,
    View,
    axis,
    band,
    curve,
    decade_axis,
    doubling_axis,
    heatmap,
    one_view,
    plot_text,
)
from .scores import SCORE_SCALE
from .style import Style

#: exp(-8) is 0.0003: below this a token has almost no weight
FLOOR = -8.0
RAMP = [[0.0, "var(--heat-0)"], [0.5, "var(--heat-1)"], [1.0, "var(--heat-2)"]]
#: heads and layers are named in the figure itself: they share the colour of their encoding
LEGEND = {"showlegend": True}
Picture = Mapping[str, Any]


def picture_figures(picture: Picture, style: Style, key: str) -> list[Figure]:
    """Every figure the picture has data for; `key` makes their names unique on the page."""
    made = [
        make(picture, style) for make in (_bias, _kernel, _spectrum, _gates, _heatmaps, _singular, _reach)
    ]
    return [replace(figure, key=f"{key}-{figure.key}") for figure in made if not figure.empty]


def check_picture(picture: Picture) -> None:
    """Raise KeyError, TypeError, ValueError, IndexError or AttributeError if it cannot be drawn."""
    figures = picture_figures(picture, Style(0, "solid", "circle"), "check")
    json.dumps([figure.payload() for figure in figures], allow_nan=False)
    for text in (picture["singular_about"], picture.get("breaks_relative_law") or ""):
        text.strip()
    len(picture["singular"])


Entries = Sequence[Mapping[str, Any]]


def _by_layer(entries: Entries, traces: Callable[[Entries], list[Trace]]) -> list[View]:
    """A view for each layer, of the entries of its heads."""
    layers = dict.fromkeys(entry["layer"] for entry in entries)
    return [View(f"layer {n + 1}", traces([e for e in entries if e["layer"] == n])) for n in layers]


def _name(head: int | None) -> str:
    return "all heads" if head is None else f"head {head + 1}"


def _shade(style: Style, index: int, count: int) -> str:
    """Heads and layers share the encoding's colour, from faint to full."""
    return style.faint(round(0.5 + 0.5 * index / (count - 1), 2)) if count > 1 else style.color


def _heads(at: Sequence[int], style: Style) -> Callable[[Entries], list[Trace]]:
    """A line for each head; bands too, where there are few."""

    def traces(entries: Entries) -> list[Trace]:
        out = []
        for index, entry in enumerate(entries):
            if "low" in entry and len(entries) <= 8:
                out.append(band(at, entry["low"], entry["high"], style, 0.07))
            out.append(curve(_name(entry["head"]), at, entry["mean"], _shade(style, index, len(entries))))
        return out

    return traces


def _by_distance(picture: Picture, down: dict[str, Any]) -> dict[str, Any]:
    return {"xaxis": doubling_axis("distance (tokens)", picture["tokens"]), "yaxis": down, **LEGEND}


def _bias(picture: Picture, style: Style) -> Figure:
    known = [v for e in picture["bias"] for v in e["mean"] if v is not None]
    top, bottom = max(known, default=0.0), min(known, default=-1.0)
    down = axis("bias", range=[max(FLOOR, 1.08 * bottom), max(0.3, 1.08 * min(top, 8.0))])
    return Figure(
        "bias", "Bias against distance",
        "The bias of a key at each distance: one line a head, the mean over the sample text, with a band from the "
        "5% to the 95% quantile where it depends on content. A bias of −0.7 halves the weight; below −7 almost "
        "nothing is left.",
        _by_layer(picture["bias"], _heads(picture["distances"], style)), _by_distance(picture, down),
    )  # fmt: skip


def _kernel(picture: Picture, style: Style) -> Figure:
    at = picture.get("kernel_distances", picture["distances"])
    return Figure(
        "kernel", "Rotation against distance",
        "Mean score of a vector with itself at each distance, 1 at distance 0. It falls as the planes, which turn at "
        "different frequencies, go out of phase.",
        _by_layer(picture["kernel"], _heads(at, style)),
        _by_distance(picture, axis("tr G / D", range=[-0.35, 1.05])),
    )  # fmt: skip


def _spectrum(picture: Picture, style: Style) -> Figure:
    entries = picture["spectrum"]
    learned = bool(entries) and "initial" in entries[0]
    data = [_waves("initial", entries[0]["initial"], "var(--muted)", "dot")] if learned else []
    for index, entry in enumerate(entries):
        name = f"layer {entry['layer'] + 1}" + ("" if entry["head"] is None else f", {_name(entry['head'])}")
        color = _shade(style, index, len(entries))
        points: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 4, "color": color}}
        data.append(_waves(name, entry["now"], color, **points))
    look = (
        "The dotted line shows the initial values."
        if learned
        else "Short wavelengths separate neighbouring tokens, long ones encode coarse position."
    )
    down = decade_axis("wavelength (tokens)", [wave for trace in data for wave in trace["y"]])
    return Figure(
        "spectrum", "Spectrum", f"Tokens in one full turn of each plane. {look}", one_view(data),
        {"xaxis": axis("plane"), "yaxis": down, **LEGEND},
    )  # fmt: skip


def _waves(
    name: str, frequencies: Sequence[float | None], color: str, dash: str = "solid", **more: Any
) -> Trace:
    """Wavelengths by plane."""
    waves = [float(f"{2 * math.pi / f:.5g}") if f else None for f in frequencies]
    return curve(name, range(1, len(waves) + 1), waves, color, dash, **more)


def _gates(picture: Picture, style: Style) -> Figure:
    return Figure(
        "gates", "Gates",
        "Values of each gate over the sample text: the box is the middle half, whiskers run from 5% to 95%. A flat "
        "box means that the gate does not depend on the text.",
        [View(f"layer {e['layer'] + 1}: {e['name']}", [_boxes(e, style)]) for e in picture["gates"]],
        {"xaxis": axis("", type="category"), "yaxis": axis("gate")}, choose="Gate",
    )  # fmt: skip


def _boxes(entry: Mapping[str, Any], style: Style) -> Trace:
    low, q1, median, q3, high = (list(column) for column in zip(*entry["quantiles"], strict=True))
    return {
        "type": "box", "x": [_name(head) for head in entry["heads"]], "lowerfence": low, "q1": q1,
        "median": median, "q3": q3, "upperfence": high, "name": plot_text(entry["name"]),
        "line": {"color": style.color, "width": 1.5}, "fillcolor": style.faint(0.2),
        "hoverinfo": "y",
    }  # fmt: skip


def _heatmaps(picture: Picture, style: Style) -> Figure:
    biased = picture["heatmap_of"] == "bias"
    words = [_word(word) for word in picture["words"]]
    title, strong, look = (
        ("Bias on a sample text", "smaller the penalty",
         "Columns that stand out show that the bias depends on the words, not only on distance.")
        if biased
        else ("Attention on a sample text", "larger the weight",
              "This encoding adds no bias, so the figure shows attention weights.")
    )  # fmt: skip
    ticks = {
        "tickvals": list(range(len(words))),
        "ticktext": words,
        "tickfont": {"size": 9},
        "showgrid": False,
    }
    return Figure(
        "heatmap", title,
        "Rows are queries, columns the keys they attend to; the stronger the colour, the "
        f"{strong}. {look}",
        [
            View(f"layer {e['layer'] + 1}, {_name(e['head'])}", [_triangle(e["rows"], words, biased)])
            for e in picture["heatmaps"]
        ],
        {"xaxis": {**ticks, "tickangle": -90, "side": "bottom"}, "yaxis": {**ticks, "autorange": "reversed"}},
        height=430, choose="Head",
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


def _singular(picture: Picture, style: Style) -> Figure:
    at, entries = picture["distances"], picture["singular"]

    def traces(heads: Entries) -> list[Trace]:
        data = []
        for index, entry in enumerate(heads):
            color, name = _shade(style, index, len(heads)), _name(entry["head"])
            small = curve(f"{name}, smallest", at, entry["smaller"], color, "dot", showlegend=False)
            data += [curve(name, at, entry["larger"], color), small]
        return data

    seen = [v for e in entries for v in (*e["larger"], *e["smaller"])]
    cancels = (
        "Values below 1 mean that the path forgets."
        if "path" in picture["encoding"].split("+")
        else "Only the lifted coordinates are stretched. The query is transformed by G and the key by its inverse "
        "transpose, so in the score everything cancels but the bias."
    )
    return Figure(
        "singular", "Singular values of the action",
        "The largest (full) and smallest (dotted) singular value over a distance: "
        f"{picture['singular_about']}. {cancels}",
        _by_layer(entries, traces), _by_distance(picture, decade_axis("singular value", seen)),
    )  # fmt: skip


def _reach(picture: Picture, style: Style) -> Figure:
    found = {(e["layer"], e["head"]): e["half"] for e in picture["reach"]}
    layers, heads = ([*dict.fromkeys(key[i] for key in found)] for i in (0, 1))
    half = [[found[layer, head] for head in heads] for layer in layers[::-1]]
    trace = heatmap(
        [[math.log2(1 + v) for v in row] for row in half],
        [str(head + 1) for head in heads], [str(layer + 1) for layer in layers[::-1]],
        text=[[f"{v:.0f}" for v in row] for row in half], texttemplate="%{text}",
        textfont={"color": "var(--ink)"}, colorscale=SCORE_SCALE, showscale=False,
        zmin=0, zmax=math.log2(picture["tokens"]),
        hovertemplate="layer %{y}, head %{x}: %{text} tokens<extra></extra>",
    )  # fmt: skip
    return Figure(
        "reach", "How far each head looks",
        "Half of a head's attention lies within this many tokens (median over the later half of a text of "
        f"{picture['tokens']}). Small numbers are local heads.",
        one_view([trace]), {"xaxis": axis("head", type="category"), "yaxis": axis("layer", type="category")},
        height=130 + 34 * len(layers),
    )  # fmt: skip
