"""Biases over the distance d = n_t - n_j: what the encodings on `DistanceBias` share (Eq. D1)."""

from __future__ import annotations

from torch import Tensor

from ..bias import DistanceBias
from ..bias.distance import Profile
from ..precision import readable
from .base import Encoded, Encoding, State, Tokens

#: how far a position may be from a whole number: rounding of real positions
ROUNDING = 1e-3


def whole_positions(tokens: Tokens) -> Tensor:
    """(B|1, 1, T) positions as whole numbers; any others are refused."""
    positions = tokens.positions[..., 0]
    if tokens.whole:
        return positions.unsqueeze(1)
    whole = positions.round()
    if readable(positions) and bool(((positions - whole).abs() > ROUNDING).any()):
        raise ValueError(
            "a bias over a table of distances needs positions that are whole numbers, got "
            f"{positions[0, :4].tolist()} …; round them, or use alibi or rope, which take real positions"
        )
    return whole.unsqueeze(1)


class ProfileEncoding(Encoding):
    """Base: `numbers` (H|1, R, N) and a function `profile` of them give the bias at every distance."""

    def numbers(self, tokens: Tokens) -> Tensor:
        raise NotImplementedError

    def profile(self) -> Profile:
        raise NotImplementedError

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        places, table = whole_positions(tokens), self.numbers(tokens)[None, :, None]
        return Encoded(tokens.q, tokens.k, DistanceBias(places, places, table, profile=self.profile()))


def over(number: Tensor, distance: Tensor) -> Tensor:
    """(H|1, R) with an axis of size 1 for each axis of the distances."""
    return number[..., *(None,) * distance.dim()]
