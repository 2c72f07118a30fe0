"""Log-n attention: queries times the log of their position, so that attention stays sharp in long contexts (Eq. Q1)."""

from __future__ import annotations

import math

from torch import Tensor

from ..bias import NO_BIAS
from ..checks import check_integer
from .base import Encoded, Encoding, HeadShape, State, Tokens
from .facts import Facts


class LogN(Encoding):
    """Log-n attention: multiplies <q, k> by max(1, log(n + 1) / log(length)), with n the query's position.

    It can be added to any encoding with one coordinate. Biases and their gates are not multiplied.

    Args:
        shape: heads, key heads, features of a head, and width.
        length: the training context; the factor is 1 up to this length.
    """

    sets_norms = True
    facts = (
        Facts(
            name="logn",
            about="multiplies queries by the log of their position",
            formula="logit(t, j) = max(1, log(t + 1) / log L) ⟨q_t, k_j⟩ / √D",
            group="none: a factor of the query alone, which depends on its position and not on the offset",
            source="Su, 2021, log-n attention; Chiang and Cholak, 2022, arXiv:2202.12172; Qwen",
            recovers="`nope` up to the length L",
        ),
    )

    def __init__(self, shape: HeadShape, *, length: int = 512) -> None:
        super().__init__(shape)
        check_integer("length", length, 2)
        self.length = length

    @property
    def breaks_relative_law(self) -> str:
        return "queries are multiplied by the log of their absolute position"

    def query_factor_of(self, tokens: Tokens) -> Tensor:
        factor = (tokens.positions + 1).clamp_min(self.length).log() / math.log(self.length)
        return factor.unsqueeze(1).to(tokens.working)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        return self.multiplied(Encoded(tokens.q, tokens.k, NO_BIAS), self.query_factor_of(tokens))
