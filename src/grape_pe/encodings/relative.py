"""A relative bias: learned tables over near distances, mixed by weights that depend on the query (Eq. D6)."""

from __future__ import annotations

import torch
from torch import nn

from ..bias import Beyond, DistanceBias
from ..bias.distance import BEYOND
from ..checks import check_choice, check_integer
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .distance import whole_positions
from .facts import Facts


class Relative(Encoding):
    """The bias sum over r of w_r(t) P_hr[t - j], with learned tables P and w(t) = W_h q_t / sqrt(D).

    Args:
        shape: heads, key heads, features of a head, and width.
        tables: number of tables r for each head.
        reach: number of distances in a table, 0 … reach - 1.
        beyond: the bias at larger distances: "zero", the "last" entry, or "-inf" (such keys are masked).
        both: whether the tables also have distances 1 … reach - 1 of keys after the query, for encoders.
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
            check_integer(f"{name} of relative", value)
        check_choice("beyond of relative", beyond, BEYOND)
        self.beyond, self.first = beyond, 1 - reach if both else 0
        self.table = own_parameter(shape.heads, tables, 2 * reach - 1 if both else reach)
        self.mix = own_parameter(shape.heads, shape.head_dim, tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)
        nn.init.normal_(self.mix)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        positions, working = whole_positions(tokens), tokens.working
        weight = torch.matmul(tokens.q.to(working), self.mix.to(working)) * self.shape.head_dim**-0.5
        table = self.table.to(working)[None, :, None]
        bias = DistanceBias(positions, positions, table, weight, self.first, self.beyond)
        return Encoded(tokens.q, tokens.k, bias)
