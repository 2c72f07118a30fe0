"""Sums of biases: `SumBias`, and what `+` merges."""

from __future__ import annotations

from dataclasses import dataclass

from .base import NO_BIAS, Bias, LogitFunction, NoBias
from .compound import Compound
from .slope import SlopeBias, SlopeTerm, terms_of


@dataclass(frozen=True, eq=False)
class SumBias(Compound):
    """Biases of different kinds, added. Made by `+`, which merges what can be merged.

    Args:
        parts: the biases that are added.
    """

    parts: tuple[Bias, ...]

    def members(self) -> tuple[Bias, ...]:
        return self.parts

    def at_scale(self, scale: float) -> SumBias:
        return self.changed(lambda i, part: part.at_scale(scale))

    def with_gain(self, gain: float) -> SumBias:
        return self.changed(lambda i, part: part.with_gain(gain))

    def settled(self, last: int) -> SumBias:
        return SumBias(tuple(part.settled(last) for part in self.parts))

    def logits(self) -> LogitFunction | None:
        for i, part in enumerate(self.parts):
            logits = part.logits()
            if logits is not None:
                rest = SumBias((*self.parts[:i], *self.parts[i + 1 :]))
                return lambda rows, cols: logits(rows, cols) + rest.tile(rows, cols)
        return None

    def queries(self, rows: slice) -> SumBias:
        return self.changed(lambda i, part: part.queries(rows))


def parts_of(bias: Bias) -> tuple[Bias, ...]:
    return bias.parts if isinstance(bias, SumBias) else (bias,)


def added(*biases: Bias) -> Bias:
    """Slope terms concatenate, zeros vanish, the rest is kept side by side."""
    parts = [part for bias in biases for part in parts_of(bias)]
    terms = tuple(term for part in parts for term in terms_of(part))
    slopes: list[Bias] = [SlopeBias(terms)] if terms else []
    others = [part for part in parts if not isinstance(part, (SlopeTerm, SlopeBias, NoBias))]
    kept = [*slopes, *others]
    if not kept:
        return NO_BIAS
    return kept[0] if len(kept) == 1 else SumBias(tuple(kept))
