"""Learned amplitudes of biases and frequencies of rotations, by layer and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...hf.fade import ZeroInitBias
from ..inspect.capture import frequencies, rotation_of
from ..inspect.figure_data import LAYERS, picture_of, spread
from .decoder import PretrainedDecoder


@torch.no_grad()
def heads(model: PretrainedDecoder) -> dict[str, Any]:
    """The amplitude of each bias, by layer and head; the largest change of a frequency in percent, by layer."""
    parts = [[m for m in e.modules() if isinstance(m, ZeroInitBias)] for e in model.encodings()]
    biases = zip(*parts, strict=True) if parts and parts[0] else []
    amplitudes = [[m.amplitude.clamp(min=0).tolist() for m in layers] for layers in biases]
    return {"amplitude": amplitudes, "moved": [_moved(model, i) for i in range(len(parts))]}


def _moved(model: PretrainedDecoder, layer: int) -> float | None:
    rotation = rotation_of(model.encodings()[layer])
    found = None if rotation is None else frequencies(rotation)
    if found is None:
        return None
    now, initial = found
    if initial is None:
        return None
    return float(100 * (now / initial - 1).abs().max())


def picture(model: PretrainedDecoder, tokens: Tensor, words: list[str], name: str) -> dict[str, Any]:
    """The encoding's picture on a text."""
    views = model.observe(tokens)
    shape = views[0].encoding.shape
    drawn = picture_of(spread(views, LAYERS), words)
    about = {"encoding": name, "kv_shift": False, "layers_total": len(views), "heads_total": shape.heads}
    return {**drawn, **about}
