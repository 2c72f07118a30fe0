"""The atlas as one self-contained HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean, median

import torch

from ...testing import TOL
from ...testing.summary import SHIFT
from ..config import shipped_evidence
from ..report.cells import NONE, Cell
from ..report.chart import Chart, sparkline
from ..report.page import Part, cell_html, page, sortable
from ..report.reading import read_results
from ..report.style import LIGHT
from . import cost
from .entries import HEAD_DIM, HEADS, TOKENS, WIDTH, AtlasEntry, Curves
from .markdown import build_call, listed_options

#: lowest bias shown: exp(-8) is 0.0003
FLOOR = -8.0
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
    rows = [
        f'<tr data-words="{escape(_words(each))}"><th scope="row" data-value="{escape(each.name)}">'
        f'<a href="#{_key(each)}">{escape(each.name)}</a></th>'
        f"{''.join(map(cell_html, _cells(each, kinds, losses)))}</tr>"
        for each in entries
    ]
    body = (
        "<h1>Atlas of position encodings</h1>"
        f'<p class="headline">{len(entries)} position encodings, measured on this machine</p>'
        f"{_filters(len(entries))}{sortable('atlas', heads, rows)}"
        f'<p class="caption">{escape(_caption(bool(losses)))}</p>'
    )
    return Part("table", "All encodings", body)


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
        f"Reach: half of a head's attention lies within so many of {TOKENS} random tokens, from the nearest to the "
        "farthest head. In the figures below a colour is a head.",
        "Loss: shipped results of grape compare small, mean over seeds." if results else "",
    )
    return " ".join(shown).strip()


def _key(entry: AtlasEntry) -> str:
    return f"encoding-{entry.name}"


def _words(entry: AtlasEntry) -> str:
    """Words that the filter searches."""
    facts = entry.facts
    words = [entry.name, entry.about, entry.kind, f"kind:{entry.kind}", entry.bias]
    words += [] if facts is None else [facts.recovers, facts.learned, facts.source]
    words += [f"law:{name}" for name in entry.laws.kept()]
    return " ".join([*words, "" if entry.parameters else "fixed:"]).lower()


def _cells(entry: AtlasEntry, kinds: Sequence[str], losses: Mapping[str, list[float]]) -> list[Cell]:
    laws, kept, cost, curves = entry.laws, entry.laws.kept(), entry.cost, entry.curves
    cells = [
        Cell(picture=_spark(curves)) if curves else NONE,
        Cell(entry.bias, float(kinds.index(entry.bias))),
        Cell(f"{entry.parameters:,}", entry.parameters),
        _error(laws.relative, "relative" in kept),
        NONE if laws.composition is None else _error(laws.composition, "composition" in kept),
        _error(laws.streaming, "streaming" in kept),
        Cell(f"+{entry.extra_bytes:,} B", entry.extra_bytes, f"{entry.bytes_per_token:,} B"),
        _ratio(cost.train, cost.tokens) if cost else NONE,
        _ratio(cost.decode, cost.tokens) if cost else NONE,
        _reach(curves.reach) if curves else NONE,
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


def _spark(curves: Curves) -> str:
    if curves.bias:
        return sparkline(curves.bias, FLOOR, _top(curves.bias), "var(--arm-1)")
    if curves.kernel:
        return sparkline(curves.kernel, *KERNEL, "var(--arm-0)")
    return sparkline([[0.0, 0.0]], -1.0, 1.0, "var(--muted)")


def _top(lines: Sequence[Sequence[float]]) -> float:
    return max(0.5, min(-FLOOR, max(map(max, lines))))


def _card(entry: AtlasEntry) -> Part:
    facts = entry.facts
    items = {
        "group element": "" if facts is None else formula_html(facts.group),
        "relative law": _law(entry),
        "composition": _composition(entry),
        "contains": "" if facts is None else formula_html(facts.recovers),
        "learned": "" if facts is None else escape(facts.learned or "nothing"),
        "reads": "the block's input x" if entry.contextual else "",
        "options": " ".join(f"<code>{escape(each)}</code>" for each in listed_options(entry.options))
        or "none",
        "source": "" if facts is None else _linked(facts.source),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in items.items() if text)
    formula = "" if facts is None else f'<p class="formula">{formula_html(facts.formula)}</p>'
    body = (
        f'<div class="card" data-words="{escape(_words(entry))}"><h2>{escape(entry.name)}</h2>'
        f'<p class="lead">{formula_html(entry.about)}</p>{formula}'
        f"<pre>{escape(build_call(entry))}</pre><dl>{listed}</dl>"
        f'<div class="grid">{"".join(_charts(entry.curves)) if entry.curves else ""}</div></div>'
    )
    return Part(_key(entry), entry.name, body)


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


def _charts(curves: Curves) -> list[str]:
    at = [math.log2(1 + distance) for distance in curves.distances]
    ticks = [2**i - 1 for i in range(0, 1 + int(at[-1]), 2)]
    drawn = []
    if curves.bias:
        top = _top(curves.bias)
        drawn.append(
            _by_distance("Bias against distance", curves.bias, at, ticks, (FLOOR, top), (-8, -6, -4, -2, 0))
        )
    if curves.kernel:
        drawn.append(_by_distance("Rotation: tr G / D", curves.kernel, at, ticks, KERNEL, (0, 0.5, 1)))
    return [*drawn, _reach_chart(curves.reach)]


def _by_distance(
    title: str, lines: Sequence[Sequence[float]], at: Sequence[float], ticks: Sequence[int],
    y: tuple[float, float], yticks: Sequence[float],
) -> str:  # fmt: skip
    chart = Chart(title, (0, at[-1]), y, "distance (tokens)")
    chart.axes([math.log2(1 + tick) for tick in ticks], yticks, [str(tick) for tick in ticks])
    for head, line in enumerate(lines):
        chart.line(at, line, _color(head))
    return chart.inline()


def _reach_chart(reach: Sequence[float]) -> str:
    top = TOKENS / 2
    chart = Chart("Half of attention within (tokens)", (0.3, len(reach) + 0.7), (0, top), "head")
    chart.axes(range(1, len(reach) + 1), (0, top / 2, top))
    for head, value in enumerate(reach):
        chart.bar(head + 1, min(value, top), _color(head))
    return chart.inline()


def _color(head: int) -> str:
    return f"var(--arm-{head % len(LIGHT)})"
