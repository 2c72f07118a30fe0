"""A relative bias mixed by the query: learned tables over near distances, weighted by the content (Eq. D6)."""

from __future__ import annotations

import torch
from torch import nn

from ..bias import Beyond, DistanceBias
from ..bias.distance import BEYOND
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .distance import whole_positions
from .facts import Facts


class Relative(Encoding):
    """b(t, j) = sum over r of w_r(t) P_hr[t - j], with w(t) = W_h q_t / sqrt(D).

    P starts as N(0, 0.02), W as N(0, 1).

    Args:
        shape: heads, key heads, features of a head, and width.
        tables: number of tables r for each head.
        reach: the distances 0 … reach - 1 have an entry.
        beyond: the bias at other distances: "zero", the "last" entry, or "-inf".
        both: as many entries for keys after the query, for encoders.
    """

    nonpositive = False
    facts = (
        Facts(
            name="relative",
            about="adds learned tables over near distances, mixed by the query",
            formula="b(t, j) = Σ_r ⟨w_{hr}, q_t⟩/√D P_{hr}[t − j]",
            group="none: a table obeys no composition law; scores keep the relative law",
            source="Shaw et al., 2018, arXiv:1803.02155 (full rank: one table for each feature)",
            learned="tables, mixing weights",
        ),
    )

    def __init__(
        self,
        shape: HeadShape,
        *,
        tables: int = 4,
        reach: int = 256,
        beyond: Beyond = "zero",
        both: bool = False,
    ) -> None:
        super().__init__(shape)
        for name, value in (("tables", tables), ("reach", reach)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of relative must be a positive integer, got {value!r}")
        if beyond not in BEYOND:
            raise ValueError(
                f"beyond of relative must be one of {', '.join(map(repr, BEYOND))}, got {beyond!r}"
            )
        self.beyond, self.first = beyond, 1 - reach if both else 0
        self.table = own_parameter(shape.heads, tables, 2 * reach - 1 if both else reach)
        self.mix = own_parameter(shape.heads, shape.head_dim, tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)
        nn.init.normal_(self.mix)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        places, working = whole_positions(tokens), tokens.working
        weight = torch.matmul(tokens.q.to(working), self.mix.to(working)) * self.shape.head_dim**-0.5
        table = self.table.to(working)[None, :, None]
        bias = DistanceBias(places, places, table, weight, self.first, self.beyond)
        return Encoded(tokens.q, tokens.k, bias)
