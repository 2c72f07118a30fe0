"""Biases that start at nothing: the way an additive encoding enters a trained model without disturbing it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias
from ..encodings.base import Composite, Encoded, Encoding, State, Tokens


class Faded(Encoding):
    """An additive encoding times a learned amplitude for each head, which starts at 0.

    At 0 the bias is exactly nothing, and yet the amplitude receives the full gradient; once it has left 0,
    so do the encoding's own parameters. An amplitude below 0 counts as 0 but keeps its gradient (so that it
    can come back): no distant key is ever favoured that the encoding itself does not favour.
    """

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding.shape, encoding.coords)
        self.contextual = encoding.contextual  # type: ignore[misc]
        self.nonpositive = encoding.nonpositive  # type: ignore[misc]
        self.part = encoding
        self.amplitude = nn.Parameter(torch.zeros(encoding.shape.heads))

    def reset_parameters(self) -> None:
        self.part.reset_parameters()
        nn.init.zeros_(self.amplitude)

    @property
    def breaks_relative_law(self) -> str | None:
        return self.part.breaks_relative_law

    @property
    def like(self) -> Hashable:
        return "amplitude"

    @classmethod
    def prepare(cls, parts: Sequence[Any], positions: Tensor, working: torch.dtype) -> Sequence[Any]:
        """Amplitudes (1, H, 1), none below 0."""
        amplitudes = torch.stack([part.amplitude for part in parts]).to(working)
        return amplitudes.clamp_(min=0.0)[:, None, :, None].unbind()

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        code = self.part.encode(tokens, state)
        amplitude = tokens.prepared_for(self)
        if amplitude is None:
            a = self.amplitude.to(tokens.working)
            amplitude = (a + (a.clamp(min=0.0) - a).detach()).view(1, -1, 1)
        return Encoded(code.q, code.k, faded(code.bias, amplitude), code.state)


def faded(bias: Bias, amplitude: Tensor) -> Bias:
    """The bias times an amplitude (1, H, 1): its rates are, what tokens sum or probe is not."""
    if isinstance(bias, SlopeBias):
        return SlopeBias(tuple(_faded_term(term, amplitude) for term in bias.terms))
    if isinstance(bias, PathBias):
        return replace(bias, rate=bias.rate * amplitude)
    if isinstance(bias, SumBias):
        return SumBias(tuple(faded(part, amplitude) for part in bias.parts))
    if isinstance(bias, NoBias):
        return bias
    raise TypeError(f"a {type(bias).__name__} has no rate to start from zero; use a slope or a path")


def _faded_term(term: SlopeTerm, amplitude: Tensor) -> SlopeTerm:
    rate_q, rate_k = (None if rate is None else rate * amplitude for rate in (term.rate_q, term.rate_k))
    return SlopeTerm(term.c_q, term.c_k, rate_q, rate_k, term.counts)


def fade_in(encoding: Encoding) -> Encoding:
    """The same composition with everything but the rotation starting at nothing."""
    if not isinstance(encoding, Composite):
        return encoding
    for name, part in encoding.parts.items():
        assert isinstance(part, Encoding)
        if not part.transforms:
            encoding.parts[name] = Faded(part)
    return encoding
