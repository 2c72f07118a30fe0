"""Helpers of encodings that return a `DistanceBias` (Eq. D1)."""

from __future__ import annotations

from torch import Tensor

from ..bias import DistanceBias
from ..bias.distance import Profile
from ..precision import readable
from .base import Encoded, Encoding, State, Tokens

#: real positions may differ from whole numbers by this, for rounding errors
ROUNDING = 1e-3


def whole_positions(tokens: Tokens) -> Tensor:
    """Positions, (B|1, 1, T), rounded to whole numbers; a ValueError if they are not whole."""
    positions = tokens.positions[..., 0]
    if tokens.whole:
        return positions.unsqueeze(1)
    whole = positions.round()
    if readable(positions) and bool(((positions - whole).abs() > ROUNDING).any()):
        raise ValueError(
            "this encoding needs positions that are whole numbers, because its bias is a table over distances, got "
            f"{positions[0, :4].tolist()} …; round them, or use alibi or rope, which accept real positions"
        )
    return whole.unsqueeze(1)


class ProfileEncoding(Encoding):
    """Base class: the bias is the function `profile` of the distance and of `numbers`."""

    def numbers(self, tokens: Tokens) -> Tensor:
        """The parameters of the profile, (H|1, R, N)."""
        raise NotImplementedError

    def profile(self) -> Profile:
        """The function of distances and `numbers`."""
        raise NotImplementedError

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        positions, table = whole_positions(tokens), self.numbers(tokens)[None, :, None]
        return Encoded(tokens.q, tokens.k, DistanceBias(positions, positions, table, profile=self.profile()))


def over(number: Tensor, distance: Tensor) -> Tensor:
    """Append an axis of size 1 to a number, (H|1, R), for each axis of `distance`, so that they broadcast."""
    return number[..., *(None,) * distance.dim()]
