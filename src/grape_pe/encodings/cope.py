"""CoPE (Golovneva et al., 2024): contextual positions, sums of gates that depend on the scores (Eq. B2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..bias import LogitFunction, ProductBias
from ..checks import check_integer
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .facts import Facts


class CoPE(Encoding):
    """CoPE: the bias <q_t, e[p_tj]>, with the position p_tj = sum for l = j … t of sigmoid(scale <q_t, k_l>).

    The embeddings e are shared by all heads, start at 0, and are interpolated between whole p. For keys after the
    query p is 0. Gates read q and k before any rotation, so a cache stores k twice. Computed by `blocks`.

    Args:
        shape: heads, key heads, features of a head, and width.
        positions: number of embeddings; the last one is used for all larger p.
    """

    nonpositive = False
    facts = (
        Facts(
            name="cope",
            about="embeds a gated count of the tokens in between",
            formula="b(t, j) = ⟨q_t, e[p_{tj}]⟩, p_{tj} = Σ_{l=j}^t σ(⟨q_t, k_l⟩/√D)",
            group="none: the count adds up along the path, but its embedding is no homomorphism",
            source="Golovneva et al., 2024, CoPE, arXiv:2405.18719",
            learned="embeddings",
        ),
    )

    def __init__(self, shape: HeadShape, *, positions: int = 64) -> None:
        super().__init__(shape)
        check_integer("positions of cope", positions, 2)
        self.embedding = own_parameter(positions, shape.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.embedding)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        working = tokens.working
        values = tokens.q.to(working) @ self.embedding.to(working).mT  # (B, H, T, positions)
        query, key = {"q": tokens.q, "values": values}, {"k": tokens.k}
        bias = ProductBias(_tile, query, key, self.shape.head_dim**-0.5, positions=())
        return Encoded(tokens.q, tokens.k, bias)


def _tile(
    products: LogitFunction, rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]
) -> Tensor:
    shift = key["k"].shape[2] - query["q"].shape[2]  # the last query is aligned with the last key
    last = max(rows.stop + shift, cols.stop)
    gate = products(rows, slice(cols.start, last)).sigmoid()
    token = torch.arange(cols.start, last, device=gate.device)
    t = torch.arange(rows.start + shift, rows.stop + shift, device=gate.device)
    gate = gate.masked_fill(token > t.unsqueeze(-1), 0.0)
    count = gate.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)[..., : cols.stop - cols.start]
    values = query["values"][:, :, rows]
    count = count.clamp(max=values.shape[-1] - 1)
    below = count.detach().floor().clamp(max=values.shape[-1] - 2)
    low, high = (values.gather(-1, below.long() + i) for i in (0, 1))
    return low + (count - below).to(values.dtype) * (high - low)
