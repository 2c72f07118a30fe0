"""`SumBias`, a sum of biases of different kinds."""

from __future__ import annotations

from dataclasses import dataclass

from .base import NO_BIAS, Bias, LogitFunction, NoBias
from .compound import Compound
from .slope import SlopeBias, SlopeTerm, terms_of


@dataclass(frozen=True, eq=False)
class SumBias(Compound):
    """A sum of biases of different kinds. Use `+`, which also merges slope terms.

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
    """The parts of a SumBias; for any other bias, the bias itself."""
    return bias.parts if isinstance(bias, SumBias) else (bias,)


def added(*biases: Bias) -> Bias:
    """The sum of biases: all slope terms in one SlopeBias, zeros dropped."""
    parts = [part for bias in biases for part in parts_of(bias)]
    terms = tuple(term for part in parts for term in terms_of(part))
    others = [part for part in parts if not isinstance(part, (SlopeTerm, SlopeBias, NoBias))]
    merged = ((SlopeBias(terms),) if terms else ()) + tuple(others)
    if not merged:
        return NO_BIAS
    return merged[0] if len(merged) == 1 else SumBias(merged)
