"""Biases that start at zero, so that adding one to a pretrained model leaves its logits unchanged."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..bias import Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias
from ..encodings.base import Composite, Encoded, Encoding, NoPE, State, Tokens
from ..encodings.rotary import Rotary
from ..encodings.temperature import LogN


class ZeroInitBias(Encoding):
    """Multiplies the bias of an encoding by a learned amplitude for each head, which starts at 0.

    At amplitude 0 the bias has no effect, but the amplitude still gets a gradient. The encoding's own parameters
    get one once it is above 0. The factor is max(amplitude, 0), so the bias does not change its sign; the gradient
    ignores the maximum, so a negative amplitude can grow again.

    Args:
        encoding: the additive encoding.
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
        """For each of `parts`, max(amplitude, 0), (1, H, 1)."""
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
    """Multiply a bias by an amplitude, (1, H, 1), through its rates or weights."""
    if isinstance(bias, SlopeBias):
        return SlopeBias(tuple(_faded_term(term, amplitude) for term in bias.terms))
    if isinstance(bias, PathBias):
        return replace(bias, rate=bias.rate * amplitude)
    if isinstance(bias, SumBias):
        return SumBias(tuple(faded(part, amplitude) for part in bias.parts))
    if isinstance(bias, DistanceBias):
        return _faded_distance(bias, amplitude)
    if isinstance(bias, NoBias):
        return bias
    raise ValueError(
        f"an encoding with a {type(bias).__name__} (fire, cope, dape) cannot be added to a pretrained model: it "
        "has no rate that starts at zero; use fox, alibi, grape-a-qk, grape-ap, or a table (t5, kerple-log, …)"
    )


def _faded_distance(bias: DistanceBias, amplitude: Tensor) -> DistanceBias:
    if bias.profile is None and bias.beyond == "-inf":
        raise ValueError(
            'beyond="-inf" masks distant keys and cannot start at zero; adapt with beyond="zero" or "last"'
        )
    weight = amplitude.unsqueeze(-1)
    if bias.weight is None:
        return replace(bias, weight=weight.expand(-1, -1, -1, bias.table.shape[3]))
    return replace(bias, weight=bias.weight * weight)


def _faded_term(term: SlopeTerm, amplitude: Tensor) -> SlopeTerm:
    rate_q, rate_k = (None if rate is None else rate * amplitude for rate in (term.rate_q, term.rate_k))
    return SlopeTerm(term.c_q, term.c_k, rate_q, rate_k, term.coordinate)


def fade_in(encoding: Encoding, rotation: float = 1.0) -> Encoding:
    """Wrap all biases of an encoding in `ZeroInitBias`, and set the strength of its rotation."""
    if isinstance(encoding, Composite):
        for name, part in encoding.parts.items():
            encoding.parts[name] = fade_in(part, rotation)  # type: ignore[arg-type]
        return encoding
    if isinstance(encoding, LogN):
        raise ValueError(
            "logn cannot be added to a pretrained model: it changes the logits of all tokens after its length; "
            "leave it out, or train a model with it"
        )
    if isinstance(encoding, Rotary):
        encoding.frequencies.strength = rotation
    return encoding if encoding.transforms or isinstance(encoding, NoPE) else ZeroInitBias(encoding)


def without_rotation(encoding: Encoding) -> Encoding:
    """The encoding without its rotation, made of the same modules."""
    if not isinstance(encoding, Composite):
        return NoPE(encoding.shape) if encoding.transforms else encoding
    left: dict[str, Any] = {name: part for name, part in encoding.parts.items() if not part.transforms}  # type: ignore[union-attr]
    return next(iter(left.values())) if len(left) == 1 else Composite(encoding.shape, left)
