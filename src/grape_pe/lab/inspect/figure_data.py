"""The picture of an encoding in a trained model, as numbers for the report.

    json.dumps(picture(model, tokens, words))

Every list is rounded and every axis thinned out, so that a picture stays below 150 kB whatever the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...encodings import Encoding
from ...models import Decoder
from .capture import (
    LayerView,
    by_distance,
    distances,
    frequencies,
    gates,
    observe,
    observe_encoding,
    reach,
    rotation_kernel,
    rotation_of,
)
from .singular_values import action

VERSION = 1
#: of the sample text: tokens that are read, tokens of the heatmaps
TOKENS, WINDOW = 256, 28
#: layers and heads that are shown, spread evenly over those there are
LAYERS, HEADS = 4, 8
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def picture(model: Decoder, tokens: Tensor, words: list[str]) -> dict[str, Any]:
    """What the model's encoding does on a sample text, ready for JSON.

    Args:
        tokens: (T,) or (1, T) of one text; the first 256 are read. words: how each token is written.
    """
    row = tokens.reshape(-1)[:TOKENS] if tokens.dim() == 1 else tokens[0, :TOKENS]
    if len(row) < 2 or len(words) < len(row):
        raise ValueError(
            f"a picture needs at least 2 tokens and a word for each, got {len(row)} and {len(words)}; "
            "give a longer sample text"
        )
    views = observe(model, row)
    config = model.config
    return {
        **picture_of(spread(views, LAYERS), words),
        "encoding": config.encoding_label,
        "kv_shift": config.kv_shift,
        "layers_total": config.layers,
        "heads_total": config.heads,
    }


def encoding_picture(encoding: Encoding, name: str, tokens: int = 128) -> dict[str, Any]:
    """The picture of an encoding by itself, on random tokens."""
    shape = encoding.shape
    body = picture_of([observe_encoding(encoding, tokens)], [f"token {i}" for i in range(tokens)])
    return {**body, "encoding": name, "kv_shift": False, "layers_total": 1, "heads_total": shape.heads}


@torch.no_grad()
def picture_of(views: Sequence[LayerView], words: Sequence[str]) -> dict[str, Any]:
    """The picture of layers that were observed."""
    at, fine = distances(views[0].length), _fine(views[0].length)
    biased = all(view.bias() is not None for view in views)
    different = {view.encoding.spec: view for view in views}.values()
    broken = [why for view in views if (why := view.encoding.breaks_relative_law) is not None]
    return {
        "version": VERSION,
        "tokens": views[0].length,
        "words": [word[:16] for word in words[:WINDOW]],
        "distances": at,
        "bias": [curve for view in views for curve in _curves(view.layer, view.bias(), at)],
        "kernel": [curve for view in views for curve in _curves(view.layer, rotation_kernel(view), fine)],
        "kernel_distances": fine,
        "spectrum": [entry for view in views for entry in _spectrum(view)],
        "gates": [entry for view in views for entry in _gates(view)],
        "singular": [entry for view in views for entry in _singular(view, at)],
        "singular_about": "; ".join(dict.fromkeys(action(view).about for view in different)),
        "reach": [entry for view in views for entry in _reach(view)],
        "heatmap_of": "bias" if biased else "attention",
        "heatmaps": [
            entry
            for view in views
            for entry in _heatmaps(view.layer, view.bias() if biased else view.attention())
        ],
        "breaks_relative_law": "; ".join(dict.fromkeys(broken)) or None,
    }


def _fine(length: int) -> list[int]:
    """Dense enough for the fastest planes, which turn once in six tokens."""
    return [*range(min(length, 64)), *range(64, length, 2)]


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of them, the first and the last included."""
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def _rounded(values: Tensor, digits: int = 3) -> list[Any]:
    """Nested lists with a few significant digits; None for what is not finite."""
    if values.dim() > 1:
        return [_rounded(row, digits) for row in values]
    return [float(f"{v:.{digits}g}") if abs(v) != float("inf") and v == v else None for v in values.tolist()]


def _curves(layer: int, pairs: Tensor | None, at: Sequence[int]) -> Iterator[dict[str, Any]]:
    if pairs is None:
        return
    found = by_distance(pairs, at)
    shared = bool((found == found[:1]).all())
    for head in [0] if shared else spread(range(found.shape[0]), HEADS):
        mean, low, high = (_rounded(found[head, :, i]) for i in range(3))
        entry = {"layer": layer, "head": None if shared else head, "mean": mean}
        yield entry | ({"low": low, "high": high} if low != high else {})


def _spectrum(view: LayerView) -> Iterator[dict[str, Any]]:
    part = rotation_of(view.encoding)
    found = None if part is None else frequencies(part)
    if found is None:
        return
    now, initial = found
    for group in spread(range(now.shape[0]), HEADS):
        entry = {
            "layer": view.layer,
            "head": group if now.shape[0] > 1 else None,
            "now": _rounded(now[group], 5),
        }
        yield entry | ({} if initial is None else {"initial": _rounded(initial[0], 5)})


def _gates(view: LayerView) -> Iterator[dict[str, Any]]:
    for gate in gates(view):
        heads = spread(range(gate.values.shape[0]), HEADS)
        levels = torch.tensor(QUANTILES, dtype=torch.float64)
        quantiles = torch.stack([_sampled(gate.values[head]).quantile(levels) for head in heads])
        shared = gate.values.shape[0] == 1
        yield {
            "layer": view.layer,
            "name": gate.name,
            "heads": [None] if shared else heads,
            "quantiles": _rounded(quantiles),
        }


def _sampled(values: Tensor, limit: int = 2**16) -> Tensor:
    """torch.quantile takes a bounded number of values."""
    return values if len(values) <= limit else values[:: -(-len(values) // limit)]


def _singular(view: LayerView, at: Sequence[int]) -> Iterator[dict[str, Any]]:
    values = action(view).curves(at)
    if values is None or bool((values == 1).all()):  # a rotation: nothing to draw
        return
    for head in spread(range(values.shape[0]), HEADS):
        larger, smaller = (_rounded(values[head, :, i]) for i in range(2))
        yield {"layer": view.layer, "head": head, "larger": larger, "smaller": smaller}


def _reach(view: LayerView) -> Iterator[dict[str, Any]]:
    biased = view.bias() is not None
    for each in spread(reach(view), HEADS):
        entry = {
            "layer": view.layer,
            "head": each.head,
            "half": each.attention_half,
            "most": each.attention_most,
        }
        yield entry | ({"bias_half": each.bias_half} if biased else {})


def _heatmaps(layer: int, pairs: Tensor | None) -> Iterator[dict[str, Any]]:
    """The lower triangle of the first tokens: row t has t + 1 entries."""
    assert pairs is not None
    for head in spread(range(pairs.shape[1]), HEADS):
        square = pairs[0, head, :WINDOW, :WINDOW]
        rows = [_rounded(square[t, : t + 1]) for t in range(square.shape[0])]
        yield {"layer": layer, "head": head, "rows": rows}
