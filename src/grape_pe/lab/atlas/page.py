"""The atlas as one self-contained HTML page."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from statistics import fmean, median
from typing import Any

import torch

from ...testing import TOL
from ...testing.summary import SHIFT
from ..config import shipped_evidence
from ..report.cells import NONE, Cell, Table
from ..report.figure import Figure, View
from ..report.page import Part, grid, page
from ..report.picture_figures import FLOOR, picture_figures
from ..report.reading import read_results
from ..report.style import Style
from . import cost
from .entries import HEAD_DIM, HEADS, TOKENS, WIDTH, AtlasEntry
from .markdown import build_call, listed_options

KERNEL = (-0.4, 1.0)
#: buttons of the filter: their text and the word they search for
PICKS = {
    "relative law": "law:relative", "composition": "law:composition", "rotation": "kind:transforms",
    "bias": "kind:adds", "nothing learned": "fixed:",
}  # fmt: skip
HEADINGS = (
    "at the start", "bias", "learned", "relative", "composes", "streams", "cache", "train", "decode", "reach",
)  # fmt: skip


def atlas_page(entries: Sequence[AtlasEntry]) -> str:
    """A table that can be sorted and filtered, then a card per encoding."""
    losses = shipped_losses()
    return page("Atlas of position encodings", [_overview(entries, losses), *map(_card, entries)])


def shipped_losses() -> dict[str, list[float]]:
    """Final losses by encoding, one per seed, of the results shipped with this package."""
    shipped = shipped_evidence("small")
    if shipped is None:
        return {}
    arms = read_results([shipped]).arms
    return {arm.label: list(arm.values(lambda each: each.val_loss).values()) for arm in arms}


def _overview(entries: Sequence[AtlasEntry], losses: Mapping[str, list[float]]) -> Part:
    kinds = sorted({each.bias for each in entries})
    heads = [*HEADINGS, *(["loss"] if losses else [])]
    rows = [(each.name, _cells(each, kinds, losses)) for each in entries]
    words = {each.name: _words(each) for each in entries}
    table = Table("atlas", "", _caption(bool(losses)), heads, rows).html(_link, words.__getitem__)
    body = (
        "<h1>Atlas of position encodings</h1>"
        f'<p class="headline">{len(entries)} position encodings, measured on this machine</p>'
        f"{_filters(len(entries))}{table}"
    )
    return Part("table", "All encodings", body)


def _link(name: str) -> str:
    return f'<a href="#{_key(name)}">{escape(name)}</a>'


def _filters(count: int) -> str:
    picks = "".join(
        f'<button type="button" class="pick" aria-pressed="false" data-word="{word}">{label}</button>'
        for label, word in PICKS.items()
    )
    return (
        '<div class="filters"><input class="filter" type="search" aria-label="Filter" '
        f'placeholder="Filter: a name or a word">{picks}'
        f'<span class="count" role="status">{count} of {count}</span></div>'
    )


def _caption(results: bool) -> str:
    shown = (
        f"At the start: bias against distance (log scale, a line for each head, down to {FLOOR:g}); for rotations, the "
        "mean score of a vector with itself at that distance.",
        "Laws: the largest deviation in float32, parameters moved off their initial values, positions shifted by "
        f"{SHIFT}. A law holds up to {TOL[torch.float32]:g}.",
        f"Cache: bytes kept for each token beyond key and value, and in all ({HEADS} heads of {HEAD_DIM}, float32).",
        "Learned: parameters.",
        f"Train and decode: time of a layer of width {WIDTH} at {cost.TOKENS} tokens relative to rope, on one CPU "
        f"thread, best of {cost.ROUNDS}; differences below 5% are noise.",
        f"Reach: half of a head's attention lies within this many of {TOKENS} random tokens, from the nearest to the "
        "farthest head. In the figures below a line is a head, the first the palest.",
        "Loss: shipped results of grape compare small, mean over seeds." if results else "",
    )
    return " ".join(shown).strip()


def _key(name: str) -> str:
    return f"encoding-{escape(name)}"


def _words(entry: AtlasEntry) -> str:
    """Words that the filter searches."""
    facts = entry.facts
    words = [entry.name, facts.about, entry.kind, f"kind:{entry.kind}", entry.bias]
    words += [facts.recovers, facts.learned, facts.source]
    words += [f"law:{name}" for name in entry.laws.kept()]
    return " ".join([*words, "" if entry.parameters else "fixed:"]).lower()


def _cells(entry: AtlasEntry, kinds: Sequence[str], losses: Mapping[str, list[float]]) -> list[Cell]:
    laws, kept, cost, picture = entry.laws, entry.laws.kept(), entry.cost, entry.picture
    cells = [
        Cell(picture=_spark(picture)) if picture else NONE,
        Cell(entry.bias, float(kinds.index(entry.bias))),
        Cell(f"{entry.parameters:,}", entry.parameters),
        _error(laws.relative, "relative" in kept),
        NONE if laws.composition is None else _error(laws.composition, "composition" in kept),
        _error(laws.streaming, "streaming" in kept),
        Cell(f"+{entry.extra_bytes:,} B", entry.extra_bytes, f"{entry.bytes_per_token:,} B"),
        _ratio(cost.train, cost.tokens) if cost else NONE,
        _ratio(cost.decode, cost.tokens) if cost else NONE,
        _reach([each["half"] for each in picture["reach"]]) if picture else NONE,
    ]
    return [*cells, *([_loss(losses.get(entry.name))] if losses else [])]


def _loss(values: list[float] | None) -> Cell:
    return Cell(f"{fmean(values):.3f}", fmean(values)) if values else NONE


def _error(value: float, holds: bool) -> Cell:
    return Cell(f"{value:.0e}" if value else "0", value, "holds" if holds else "no")


def _ratio(value: float, tokens: int) -> Cell:
    return Cell(f"{value:.2f}×", value, "" if tokens == cost.TOKENS else f"{tokens} tokens")


def _reach(reach: Sequence[float]) -> Cell:
    low, high = min(reach), max(reach)
    return Cell(f"{low:.0f}" if low == high else f"{low:.0f} – {high:.0f}", median(reach))


def _spark(picture: Mapping[str, Any]) -> str:
    """The bias, or else the rotation's kernel, by distance on a log scale."""
    if picture["bias"]:
        lines = [[FLOOR if v is None else v for v in each["mean"]] for each in picture["bias"]]
        return sparkline(lines, FLOOR, max(0.5, min(-FLOOR, max(map(max, lines)))), "var(--arm-1)")
    if picture["kernel"]:
        fine, at = picture["kernel_distances"], picture["distances"]
        places = [min(bisect_left(fine, d), len(fine) - 1) for d in at]
        lines = [[each["mean"][i] for i in places] for each in picture["kernel"]]
        return sparkline(lines, *KERNEL, "var(--arm-0)")
    return sparkline([[0.0, 0.0]], -1.0, 1.0, "var(--muted)")


def sparkline(lines: Sequence[Sequence[float]], low: float, high: float, color: str) -> str:
    """Lines without axes, for a cell of a table; values beyond the range are drawn at its edge."""
    width, height = 96, 28
    drawn = []
    for line in lines:
        step = width / max(1, len(line) - 1)
        inside = [min(high, max(low, value)) for value in line]
        points = (
            f"{i * step:.1f},{height - 2 - (v - low) / (high - low) * (height - 4):.1f}"
            for i, v in enumerate(inside)
        )
        drawn.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="1.2" points="{" ".join(points)}"/>'
        )
    return f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true">{"".join(drawn)}</svg>'


def _card(entry: AtlasEntry) -> Part:
    facts, figures = entry.facts, _figures(entry)
    items = {
        "group element": formula_html(facts.group),
        "relative law": _law(entry),
        "composition": _composition(entry),
        "contains": formula_html(facts.recovers),
        "learned": escape(facts.learned) if entry.parameters else "nothing",
        "reads": "the block's input x" if entry.contextual else "",
        "options": " ".join(f"<code>{escape(each)}</code>" for each in listed_options(entry.options))
        or "none",
        "source": _linked(facts.source),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in items.items() if text)
    formula = f'<p class="formula">{formula_html(facts.formula)}</p>' if facts.formula else ""
    body = (
        f'<div class="card" data-words="{escape(_words(entry))}"><h2>{escape(entry.name)}</h2>'
        f'<p class="lead">{formula_html(facts.about)}</p>{formula}'
        f"<pre>{escape(build_call(entry))}</pre><dl>{listed}</dl>{grid(figures)}</div>"
    )
    return Part(_key(entry.name), entry.name, body, figures)


def _figures(entry: AtlasEntry) -> list[Figure]:
    """Three of the figures of its picture."""
    if entry.picture is None:
        return []
    key, out = _key(entry.name), []
    for each in picture_figures(entry.picture, Style(0, "solid", "circle"), key):
        if each.key in (f"{key}-bias", f"{key}-kernel", f"{key}-reach"):
            views = [View("", view.data) for view in each.views]
            layout = {**each.layout, "showlegend": False}
            out.append(replace(each, caption="", views=views, layout=layout))
    return out


def _law(entry: AtlasEntry) -> str:
    deviation = f"deviation {entry.laws.relative:.1e} at shift {SHIFT}"
    return escape(deviation + (f"; not promised: {entry.broken}" if entry.broken else ""))


def _composition(entry: AtlasEntry) -> str:
    laws = entry.laws
    if laws.composition is None:
        return ""
    nearest = "" if "composition" in laws.kept() else ", the nearest law, does not hold"
    return escape(f"{laws.composed}{nearest}: deviation {laws.composition:.1e}")


def formula_html(text: str) -> str:
    """Plain text with `_x`, `^x` and `code` as HTML."""
    out = escape(text, quote=False)
    for mark, tag in (("_", "sub"), (r"\^", "sup")):
        out = re.sub(rf"{mark}(?:\{{(.*?)\}}|(\w))", rf"<{tag}>\1\2</{tag}>", out)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", out)


def _linked(source: str) -> str:
    return re.sub(r"arXiv:([\d.]+\d)", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', escape(source))
