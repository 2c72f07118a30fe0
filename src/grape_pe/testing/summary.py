"""Measure all laws of an encoding, as `grape encodings` and the atlas show them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..encodings.base import Encoding
from ..encodings.rotary import RotationEncoding
from .laws import (
    TOL,
    Sample,
    composition_error,
    linearity_error,
    path_composition_error,
    relative_law_error,
    sample,
    streaming_error,
)

#: default shift of all positions
SHIFT = 1000


@dataclass(frozen=True)
class LawErrors:
    """The deviations of an encoding from its laws, relative to max(1, |value|).

    Args:
        relative: deviation from the relative law.
        composition: deviation from the law `composed`; None without a rotation or bias that could have one.
        composed: the composition law; for a bias, the one with the smaller deviation.
        streaming: deviation of scores when the sequence is encoded in pieces.
        largest_bias: the largest b(t, j) for j <= t; None without a bias.
    """

    relative: float
    composition: float | None
    composed: str
    streaming: float
    largest_bias: float | None

    def kept(self, tolerance: float = TOL[torch.float32]) -> list[str]:
        """The names of the laws that hold up to `tolerance`."""
        composes = self.composition is not None and self.composition <= 2 * tolerance
        laws = {
            "relative": self.relative <= tolerance,
            "composition": composes,
            "streaming": self.streaming <= tolerance,
            "non-positive": self.largest_bias is not None and self.largest_bias <= 0,
        }
        return [name for name, holds in laws.items() if holds]


@torch.no_grad()
def law_errors(enc: Encoding, data: Sample | None = None, *, shift: float = SHIFT) -> LawErrors:
    """Measure the deviations of an encoding from its laws.

    Args:
        enc: the encoding.
        data: the inputs; random ones by default.
        shift: number to add to all positions, for the relative law.

    Returns:
        The deviations.
    """
    data = data or sample(enc)
    bias = enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions).bias.dense()
    composition, law = _composition(enc, data, bias is not None)
    return LawErrors(
        relative_law_error(enc, data, shift=shift),
        composition,
        law,
        streaming_error(enc, data),
        None if bias is None else bias.tril().max().item(),
    )


def _composition(enc: Encoding, data: Sample, biased: bool) -> tuple[float | None, str]:
    if isinstance(enc, RotationEncoding):
        return composition_error(enc, data), "G(n) G(m) = G(n + m)"
    if not biased or enc.transforms:
        return None, ""
    laws = {
        "b(2m) = 2 b(m)": linearity_error(enc, data),
        "b(t, j) = b(t, l) + b(l, j)": path_composition_error(enc, data),
    }
    law = min(laws, key=lambda name: laws[name])
    return laws[law], law


@torch.no_grad()
def moved(enc: Encoding, seed: int = 0) -> Encoding:
    """Add noise to all parameters, in place, because a law may hold by accident at their initial values."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in enc.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return enc
